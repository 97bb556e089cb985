"""Forwards that write to parameters: put back like buffers, or said where nobody could know before."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step
from anybatch.core.errors import OutOfMemoryError
from anybatch.engine import admit, carry_out
from tests.faults.scarce import scarce_in_passes
from tests.snapshots import changes, snapshot

ROWS = 16


class Momentum(nn.Module):
    """A momentum encoder: its forward writes to parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.5).add_(self.query.weight, alpha=0.5)
        return self.query(x) + self.key(x)


class Counted(Momentum):
    """Shapes depend on values, so that it cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[: int((x[:, 0] > 0).sum())].sum() * 0


def bounded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(32, 4))


def batch_for(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(4, (ROWS,), generator=generator)
    if isinstance(model, Momentum):
        return torch.randn(ROWS, 6, generator=generator), y
    return torch.randint(20, (ROWS, 4), generator=generator), y


def make(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=4, check=False)


@pytest.mark.parametrize(("make_model", "steps"), [(bounded, 0), (bounded, 4), (Momentum, 1), (Momentum, 4)])
def test_all_is_put_back_where_nothing_fits(make_model: Any, steps: int) -> None:
    step = make(make_model())
    for _ in range(steps):
        step(batch_for(step.model))
    before = snapshot(step)
    with scarce_in_passes(set(range(12, 10_000))), pytest.raises(OutOfMemoryError):
        step(batch_for(step.model))
    assert changes(before, snapshot(step)) == []


@pytest.mark.parametrize(("make_model", "steps"), [(bounded, 0), (bounded, 4), (Momentum, 1), (Momentum, 4)])
@pytest.mark.parametrize("at", [3, 7, 12, 20])
def test_a_redone_micro_batch_finds_what_it_found(make_model: Any, steps: int, at: int) -> None:
    step, twin = make(make_model()), make(make_model())
    for one in (step, twin):
        for _ in range(steps):
            one(batch_for(one.model))
    batch = batch_for(step.model)
    with scarce_in_passes({at}):
        report = step(batch)
    task = twin.task()
    task.effects.begin(task.modules)
    plan = replace(twin.plan(ROWS), cut=report.cut, micro_batch=max(report.cut))
    assert carry_out(plan, task, admit(batch, task, None)).loss == report.loss
    assert changes(snapshot(twin), snapshot(step)) == []


def test_the_very_first_time_it_is_said() -> None:
    step = make(Momentum())
    with scarce_in_passes({3}), pytest.raises(OutOfMemoryError, match="not as before: load them again"):
        step(batch_for(step.model))
    key = step.model.get_parameter("key.weight")
    assert [one is key for one in step.effects.parameters] == [True]


def test_a_step_does_not_begin_again_from_other_parameters() -> None:
    step = make(Momentum())
    with scarce_in_passes({0, 1, 2, 20, 21, 22, 23}), pytest.raises(OutOfMemoryError):
        step(batch_for(step.model))


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("make_model", [bounded, Momentum, Counted])
def test_planning_changes_no_parameter(make_model: Any, measure: bool) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ab.plan(model, nn.CrossEntropyLoss(), optimizer, batch_for(model), memory="1GiB", measure=measure)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
