"""Cuts within a budget by what micro-batches were seen to take."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step
from anybatch.core import BudgetError, NonFiniteLossError
from anybatch.planner import measured
from anybatch.testing import relative_error
from tests.budgets import Untraceable, metered
from tests.options import flat
from tests.snapshots import same_as_before

ROWS, WIDTH = 24, 64


class Wide(nn.Module):
    """A megabyte of activations per row, nearly; tensors are most of what it takes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).sin())
        return x.mean((1, 2))


def batch_of(rows: int = ROWS, length: int = 100) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, length, WIDTH, generator=draw), torch.randn(rows, generator=draw)


def make(memory: str | int | None, *, dropout: float = 0.0, **options: Any) -> Step:
    torch.manual_seed(0)
    model = options.pop("model", None) or Wide(dropout)
    loss = options.pop("loss", nn.MSELoss())
    return Step(model, loss, torch.optim.AdamW(model.parameters()), memory=memory, **flat(options))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("memory", [2_500_000, 4_000_000])
def test_steps_keep_to_the_budget_and_are_those_of_the_whole_batch(
    memory: int, check: bool, made: list[Any]
) -> None:
    step, whole, batch = make(memory, check=check), make(None), batch_of()
    cuts = [step(batch).cut for _ in range(4)]
    assert 0.6 * memory < metered(step, lambda: step(batch), batch) <= memory
    assert all(max(cut) - min(cut) <= 1 < len(cut) for cut in cuts[1:])
    assert not made
    for _ in range(5):
        whole(batch)
    assert relative_error(dict(step.model.named_parameters()), dict(whole.model.named_parameters())) <= 1e-3


def test_what_is_read_before_the_first_step_is_undone() -> None:
    step = make(3_000_000)
    with same_as_before(step), pytest.raises(NonFiniteLossError):  # a batch of NaN: no update
        step((torch.full((ROWS, 100, WIDTH), torch.nan), torch.zeros(ROWS)))


def test_a_wrong_batch_does_not_end_the_readings(made: list[Any]) -> None:
    step, batch = make(4_000_000), batch_of()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        step((batch[0][..., 1:], batch[1]))
    made.clear()
    assert step(batch).updated
    assert not made


def test_what_cannot_be_traced_is_read() -> None:
    model = Untraceable()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), memory=10**7)
    assert step((torch.randn(64, 8), torch.zeros(64, dtype=torch.long))).updated


def test_a_budget_too_small_for_what_cannot_be_traced_names_one_that_is_not() -> None:
    batch = torch.randn(64, 8), torch.zeros(64, dtype=torch.long)
    with pytest.raises(BudgetError, match=r"By readings this takes .* larger memory=") as caught:
        make(9_000, model=Untraceable(), loss=nn.CrossEntropyLoss())(batch)
    memory = int(1.1 * caught.value.smallest)
    assert make(memory, model=Untraceable(), loss=nn.CrossEntropyLoss())(batch).updated


def test_lengths_share_one_law(made: list[Any]) -> None:
    step = make(4_000_000)
    for length in (60, 100, 80, 120, 70, 90, 110, 50):
        batch = batch_of(length=length)
        step(batch)
        assert metered(step, lambda batch=batch: step(batch), batch) <= 1.05 * 4_000_000
    assert not made
    (known,) = step.planning.budget._measured.values()  # pyright: ignore
    assert sum(map(len, known.law.readings.values())) < 25


def test_rows_that_meet_are_not_cut_and_the_reason_is_told_where_they_do_not_fit() -> None:
    def loss(model: nn.Module, micro: Any) -> ab.Total:
        out = model(micro[0])
        return ab.Total(((out - 9 * out.mean()) ** 2).sum(), len(out))

    torch.manual_seed(0)
    batch = batch_of(8)
    assert make(10**8, loss=loss)(batch).cut == (8,)
    with pytest.raises(ab.BudgetError, match="Rows affect each other"):
        make(1_000_000, loss=loss)(batch)


def test_many_small_rows_far_from_the_budget_are_hardly_cut_from_the_first_step_on() -> None:
    model = nn.Linear(8, 2)
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), memory="1GB")
    assert step((torch.randn(4096, 8), torch.randint(2, (4096,)))).micro_batches <= 2


def test_where_random_numbers_are_drawn_the_cut_stays_from_the_third_step_on() -> None:
    step = make("auto", dropout=0.5)
    cuts = [step(batch_of()).cut for _ in range(9)]
    assert len(set(cuts[3:])) == 1
    assert not step.planning.budget._measured.popitem()[1].level  # pyright: ignore


@pytest.mark.parametrize("is_faster", [True, False])
def test_halves_stay_where_they_are_faster(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of()
    clock = {"now": 0.0}

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wide()

        def forward(self, x: Tensor) -> Tensor:
            clock["now"] += len(x) ** (1.5 if is_faster else 0.5)
            return self.inner(x)

    monkeypatch.setattr(measured, "perf_counter", lambda: clock["now"])
    step = make("auto", model=Timed())
    for _ in range(8):
        step(batch)
    cuts = {step(batch).cut for _ in range(3)}
    assert cuts == ({(12, 12)} if is_faster else {(24,)})
    assert ("was faster" in str(step.foresee(batch))) is is_faster
    resumed = make("auto", model=Timed())
    resumed.planning.budget.load(json.loads(json.dumps(step.planning.budget.state())))  # pyright: ignore
    assert {resumed(batch).cut} == cuts


def test_a_run_that_goes_on_cuts_as_the_unbroken_one(made: list[Any]) -> None:
    lengths = [100, 60, 120, 90, 70, 110]
    unbroken = make(4_000_000)
    cuts = [unbroken(batch_of(length=length)).cut for length in lengths]
    first, second = make(4_000_000), make(4_000_000)
    for length in lengths[:3]:
        first(batch_of(length=length))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizers[0].load_state_dict(first.optimizers[0].state_dict())
    second.planning.budget.load(json.loads(json.dumps(first.planning.budget.state())))  # pyright: ignore
    assert [second(batch_of(length=length)).cut for length in lengths[3:]] == cuts[3:]
    assert not made


def test_beside_a_profiler_of_the_callers_nothing_is_read(made: list[Any]) -> None:
    step = make(4_000_000)
    with torch.profiler.profile():
        assert step(batch_of()).updated
    assert made


class Heavy(nn.Module):
    """Many parameters beside few activations."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(512, 512) for _ in range(6)]
        self.layers = nn.Sequential(nn.Linear(WIDTH, 512), *layers, nn.Linear(512, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mean(1))[:, 0]


HEAVY = 4 * sum(parameter.numel() for parameter in Heavy().parameters())  # bytes of its weights


def test_gradients_are_no_activations_of_the_micro_batch(made: list[Any]) -> None:
    step, batch = make(4 * HEAVY + 5_000_000, model=Heavy()), batch_of(96, 1)
    assert [step(batch).micro_batches for _ in range(3)][-1] <= 2
    assert not made


def test_what_the_update_takes_for_a_moment_is_within_the_budget() -> None:
    model, memory, batch = Heavy(), 4 * HEAVY + 5_000_000, batch_of(96, 1)
    step = Step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), foreach=True), memory=memory)
    for _ in range(3):
        step(batch)
    assert metered(step, lambda: step(batch), batch) <= memory


class Narrow(nn.Module):
    """Nothing of its input is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1))[:, 0]


def test_what_collate_makes_is_within_the_budget(made: list[Any]) -> None:
    batch = batch_of(ROWS, 1000)
    samples = [*zip(*batch, strict=True)]

    def collate(few: Any) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in few]), torch.stack([y for _, y in few])

    memory = 4_000_000
    step = make(memory, model=Narrow(), collate=collate)
    for _ in range(3):
        step(samples)
    own = sum(x.nbytes + y.nbytes for x, y in [batch])
    assert 0.6 * memory < metered(step, lambda: step(samples), ()) - own <= memory
    assert not made


def test_gradients_that_are_there_count(made: list[Any]) -> None:
    memory, batch = 5 * HEAVY + 3_000_000, batch_of(1024, 1)
    model = Heavy()
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), momentum=0.9), memory=memory)
    for _ in range(7):  # until all rows go at once
        step(batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert metered(step, lambda: step(batch), batch) <= memory
