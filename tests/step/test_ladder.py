"""The ladder of a step in a budget: fewer rows, then blocks that run again, then refusal; all are read."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step
from anybatch.core import BudgetError, PlanError
from anybatch.engine import admit
from anybatch.testing import relative_error
from tests.budgets import metered, refused
from tests.options import flat
from tests.snapshots import same_as_before
from tests.zoo import Made

ROWS, WIDTH = 24, 64


def wide(dropout: float = 0.0) -> nn.Module:
    """Return a model of a megabyte of activations per row, nearly; tensors are most of what it takes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).sin())
        return x.mean((1, 2))

    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    return Made(forward, layers=layers, drop=nn.Dropout(dropout))


def batch_of(rows: int = ROWS, length: int = 100) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, length, WIDTH, generator=draw), torch.randn(rows, generator=draw)


def make(memory: str | int | None, *, dropout: float = 0.0, **options: Any) -> Step:
    torch.manual_seed(0)
    model = options.pop("model", None) or wide(dropout)
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
    assert all(len(cut) > 1 for cut in cuts)
    assert not made
    for _ in range(5):
        whole(batch)
    assert relative_error(dict(step.model.named_parameters()), dict(whole.model.named_parameters())) <= 1e-3


def test_rows_that_meet_are_not_cut_and_the_reason_is_told_where_they_do_not_fit() -> None:
    def loss(model: nn.Module, micro: Any) -> ab.Total:
        out = model(micro[0])
        return ab.Total(((out - 9 * out.mean()) ** 2).sum(), len(out))

    torch.manual_seed(0)
    batch = batch_of(8)
    assert make(10**8, loss=loss)(batch).cut == (8,)
    with pytest.raises(ab.BudgetError, match="Rows affect each other"):
        make(1_000_000, loss=loss)(batch)


# ---- blocks that run again


# ---- losses over all rows


def over_all(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean() + F.mse_loss(outputs[:, 0], targets)


def test_a_loss_over_all_rows_is_read_and_counts(made: list[Any]) -> None:
    """The similarities of 256 rows take half a megabyte, three times for a moment."""

    def trained(memory: int | None) -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Sigmoid(), nn.Linear(512, 16)).double()
        step = make(memory, model=model, loss=ab.WholeBatch(over_all))
        assert (memory is None) is (max(step(batch).micro_batches for _ in range(2)) == 1)
        return step

    x = torch.randn(256, 64).double()
    batch, least = (x, x[:, 0]), 2_000_000
    while True:
        try:
            trained(least)
            break
        except BudgetError as error:  # the loss over a few rows is read first, and may promise too much
            least = error.smallest
    whole = trained(None)
    whole(batch)
    for memory in (least, 3 * least // 2):
        step = trained(memory)
        assert 0.5 * memory < metered(step, lambda step=step: step(batch), batch) <= memory
        assert relative_error([*step.model.parameters()], [*whole.model.parameters()]) <= 1e-9
    assert not made


def test_where_random_numbers_are_drawn_the_cut_stays() -> None:
    step = make("auto", dropout=0.5)
    cuts = [step(batch_of()).cut for _ in range(9)]
    assert len(set(cuts[3:])) == 1


def test_beside_a_profiler_of_the_callers_a_step_needs_readings_from_before(made: list[Any]) -> None:
    step = make(4_000_000)
    with torch.profiler.profile(), same_as_before(step), pytest.raises(PlanError, match="a profiler is open"):
        step(batch_of())
    cut = step(batch_of()).cut
    with torch.profiler.profile():
        assert sum(step(batch_of()).cut) == sum(cut)
    assert not made


def heavy() -> nn.Module:
    """Return a model of many parameters and few activations."""
    layers = [nn.Linear(512, 512) for _ in range(6)]
    body = nn.Sequential(nn.Linear(WIDTH, 512), *layers, nn.Linear(512, 1))
    return Made(lambda self, x: self.body(x.mean(1))[:, 0], body=body)


HEAVY = 4 * sum(parameter.numel() for parameter in heavy().parameters())  # bytes of its weights


def test_a_budget_below_what_is_always_held_is_refused_with_one_that_holds(made: list[Any]) -> None:
    """Also the state of the optimizer counts, which the first update is still to make."""
    batch, model = batch_of(96, 1), heavy()
    floor = 4 * HEAVY + sum(leaf.nbytes for leaf in batch)
    for memory in (1_000, floor - 10_000):
        told = "above parameters, gradients, optimizer state"
        least = refused(make(memory, model=model), batch, told)
        assert floor < least < 1.3 * floor
    step = make(least, model=copy.deepcopy(model))
    assert [step(batch).updated for _ in range(4)] == [True] * 4
    assert metered(step, lambda: step(batch), batch) <= least
    refused(make(int(0.9 * least), model=model), batch, "smallest")
    assert not made


def test_what_the_update_takes_for_a_moment_is_within_the_budget() -> None:
    def step(memory: int) -> Step:
        model = heavy()
        return Step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), foreach=True), memory=memory)

    batch, tight = batch_of(96, 1), step(memory := 4 * HEAVY + 5_000_000)
    for _ in range(3):  # the second update is read; all parameters at once do not fit
        tight(batch)
    task = tight.task()
    assert tight.planning.plan_for(task, admit(batch, task, None))[0].foreach is False
    assert metered(tight, lambda: tight(batch), batch) <= memory


def test_what_collate_makes_is_within_the_budget(made: list[Any]) -> None:
    batch = batch_of(ROWS, 1000)
    samples = [*zip(*batch, strict=True)]

    memory = 4_000_000
    model = Made(lambda self, x: self.layer(x.mean(1))[:, 0], layer=nn.Linear(WIDTH, 1))
    step = make(memory, model=model, collate=torch.utils.data.default_collate)
    for _ in range(3):
        step(samples)
    own = sum(x.nbytes + y.nbytes for x, y in [batch])
    assert 0.6 * memory < metered(step, lambda: step(samples), ()) - own <= memory
    assert not made
