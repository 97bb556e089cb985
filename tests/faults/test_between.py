"""What a user changes between steps and adds is noticed, or named; nothing goes on in silence."""

import weakref

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import OutOfMemoryError, WindowError
from anybatch.testing import relative_error, tolerance

ROWS = torch.ones(4, 3), torch.ones(4, 1)


class Counting(nn.Module):
    """Multiplies by how many forwards its cache has seen; memory runs out in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.cache: list[int] = []
        self.store = {"count": torch.zeros(1)}
        self.fails_at = -1
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(1)
        if self.writes:
            self.store["count"] += 1
        if len(self.cache) == self.fails_at and len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.layer(x) * len(self.cache)


def make(model: nn.Module, **options: object) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, nn.MSELoss(), optimizer, **options)  # type: ignore[arg-type]


def test_unfreezing_between_two_adds_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    window = make(model).window()
    window.add(ROWS)
    model[0].requires_grad_(True)
    with pytest.raises(WindowError, match="same 2 parameters"):
        window.add(ROWS)
    window.discard()


def test_a_cache_that_is_renewed_before_each_step_comes_back() -> None:
    model = Counting()
    step = make(model, micro_batch=2, check=False)  # the result depends on the cut
    for number in range(6):
        model.cache = []
        model.fails_at = 2 if number == 5 else -1
        report = step(ROWS)
    assert report.redone == 1
    assert len(model.cache) == report.micro_batches


def test_a_tensor_in_a_dict_that_a_forward_writes_to_is_named() -> None:
    model = Counting()
    model.writes, model.fails_at = True, 2
    with pytest.raises(OutOfMemoryError, match="store"):
        make(model, micro_batch=2)(ROWS)


def test_gradients_found_come_back_unclipped_where_the_update_fails() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model.extra = nn.Parameter(torch.ones(3))
    model.extra.grad = torch.full((3,), 5.0)
    step = ab.Step(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), micro_batch=2, clip_norm=0.01)
    with pytest.raises(RuntimeError, match="sparse"):
        step((torch.tensor([0, 1, 2, 3]), torch.ones(4, 1)))
    assert model.extra.grad.tolist() == [5.0, 5.0, 5.0]


def test_memory_that_runs_out_half_way_through_the_backward_of_a_later_add() -> None:
    def trained(fails_at: set[int], sizes: tuple[int, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        rows = torch.randn(12, 3).double(), torch.randn(12, 1).double()
        backwards = [0]

        def fail(gradient: Tensor) -> None:  # the last layer has its gradient by now
            backwards[0] += 1
            if backwards[0] in fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        step = make(model)
        with step.window() as window:
            model[0].weight.register_hook(fail)
            for x, y in zip(rows[0].split(sizes), rows[1].split(sizes), strict=True):
                window.add((x, y))
        return [p.detach() for p in model.parameters()]

    # After the first failure each add comes in halves.
    cases = [({1}, (4, 4, 4)), ({3}, (4, 4, 4)), ({1, 6}, (4, 4, 4)), ({1, 7}, (4, 4, 4)), ({2}, (4, 8))]
    for fails_at, sizes in cases:
        error = relative_error(trained(fails_at, sizes), trained(set(), (12,)))
        assert error <= tolerance(torch.float64, 3)


def test_an_add_that_was_done_again_counts_once() -> None:
    model = Counting()
    model.forward = fails_once(model)  # type: ignore[method-assign]
    step = make(model)
    with step.window() as window:
        for _ in range(3):
            window.add((torch.ones(1, 3), torch.ones(1, 1)))
        report = window.update()
    assert (report.redone, report.rows) == (1, 3)


def fails_once(model: Counting) -> object:
    calls = [0]

    def forward(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model.layer(x)

    return forward


def test_a_window_lets_the_rows_of_an_add_go() -> None:
    window = make(nn.Linear(3, 1)).window()
    rows = torch.ones(4, 3)
    window.add((rows, torch.ones(4, 1)))
    alive = weakref.ref(rows)
    del rows
    assert alive() is None
    window.discard()
