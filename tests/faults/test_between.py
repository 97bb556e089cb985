"""What a user changes between steps and adds is noticed, or named; nothing goes on in silence."""

import weakref

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import OutOfMemoryError, WindowError
from tests.faults.faulty import NO_MEMORY
from tests.options import flat

BATCH = torch.ones(4, 3), torch.ones(4, 1)


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
            raise NO_MEMORY
        return self.layer(x) * len(self.cache)


def make(model: nn.Module, **options: object) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, nn.MSELoss(), optimizer, **flat(options))  # type: ignore[arg-type]


def test_unfreezing_between_two_adds_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    window = make(model).window()
    window.add(BATCH)
    model[0].requires_grad_(True)
    with pytest.raises(WindowError, match="same 2 parameters"):
        window.add(BATCH)
    window.discard()


def test_a_cache_that_is_renewed_before_each_step_comes_back() -> None:
    model = Counting()
    step = make(model, micro_batch=2, check=False)  # the result depends on the cut
    for number in range(6):
        model.cache = []
        model.fails_at = 2 if number == 5 else -1
        report = step(BATCH)
    assert report.redone == 1
    assert len(model.cache) == report.micro_batches


def test_a_tensor_in_a_dict_that_a_forward_writes_to_is_named() -> None:
    model = Counting()
    model.writes, model.fails_at = True, 2
    with pytest.raises(OutOfMemoryError, match="store"):
        make(model, micro_batch=2)(BATCH)


def test_gradients_found_come_back_unclipped_where_the_update_fails() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model.extra = nn.Parameter(torch.ones(3))
    model.extra.grad = torch.full((3,), 5.0)
    step = ab.Step(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), micro_batch=2, clip_norm=0.01)
    with pytest.raises(RuntimeError, match="sparse"):
        step((torch.tensor([0, 1, 2, 3]), torch.ones(4, 1)))
    assert model.extra.grad.tolist() == [5.0, 5.0, 5.0]


def test_a_window_lets_the_rows_of_an_add_go() -> None:
    window = make(nn.Linear(3, 1), check=False).window()  # a comparison keeps them until the window is closed
    rows = torch.ones(4, 3)
    window.add((rows, torch.ones(4, 1)))
    alive = weakref.ref(rows)
    del rows
    assert alive() is None
    window.discard()
