"""Forwards that write to parameters or to their rows: put back, or said where nobody could know before."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch import AnybatchError, Options, Precision, Step
from anybatch.core.errors import OutOfMemoryError
from anybatch.engine import admit, carry_out
from tests.faults.scarce import scarce_in_passes
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Made, momentum

ROWS = 16


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def bounded() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(32, 4))


def make(make_model: Any, steps: int = 0) -> tuple[Step, Any]:
    """A step after some updates, and its batch."""
    torch.manual_seed(0)
    model = make_model()
    x = torch.randint(20, (ROWS, 4)) if make_model is bounded else torch.randn(ROWS, 6)
    batch = x, torch.randint(4, (ROWS,))
    step = Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=4, options=Options(check=False))
    for _ in range(steps):
        step(batch)
    return step, batch


WRITING = [(bounded, 0), (bounded, 4), (momentum, 1), (momentum, 4)]


@pytest.mark.parametrize(("make_model", "steps"), WRITING)
def test_all_is_put_back_where_nothing_fits(make_model: Any, steps: int) -> None:
    step, batch = make(make_model, steps)
    none_fits = scarce_in_passes(set(range(12, 10_000)))
    with same_as_before(step), none_fits, pytest.raises(OutOfMemoryError):
        step(batch)


@pytest.mark.parametrize(("make_model", "steps"), WRITING)
@pytest.mark.parametrize("at", [3, 7, 12, 20])
def test_a_redone_micro_batch_finds_what_it_found(make_model: Any, steps: int, at: int) -> None:
    (step, batch), (twin, _) = make(make_model, steps), make(make_model, steps)
    with scarce_in_passes({at}):
        report = step(batch)
    task = twin.task()
    task.effects.begin(task.network.modules)
    plan = replace(twin.plan(ROWS), cut=report.cut, micro_batch=max(report.cut))
    assert carry_out(plan, task, admit(batch, task, None)).loss == report.loss
    assert_same(snapshot(twin), snapshot(step))


@pytest.mark.parametrize("make_model", [bounded, momentum])
def test_planning_changes_no_parameter(make_model: Any) -> None:
    step, batch = make(make_model)
    with same_as_before(step):
        ab.plan(step.model, nn.CrossEntropyLoss(), step.optimizers, batch, **flat({"memory": "1GiB"}))


SCALED = Precision(compute="float16", loss_scale=2.0**14)


@pytest.mark.parametrize(("fault", "steps"), [("overflow", 0), ("memory", 0), ("memory", 4)])
def test_rows_that_are_not_as_before_are_told_and_no_update_is_made(fault: str, steps: int) -> None:
    def rows() -> Any:
        return torch.zeros(8, 4), torch.full((8, 1), 40.0)

    model = Made(lambda self, x: self.linear(x.add_(1.0)), linear=nn.Linear(4, 1))  # in place
    options = {"precision": SCALED if fault == "overflow" else "float32", "check": False}
    step = Step(model, nn.MSELoss(), sgd(model, 1e-4), micro_batch=4, **flat(options))
    for _ in range(steps):
        step(rows())
    first = model.linear.weight.detach().clone()
    for _ in range(2):
        with (
            pytest.raises(AnybatchError, match=r"rows are not as before: hand them over anew, .*x\.clone"),
            scarce_in_passes({3} if fault == "memory" else set()),
        ):
            step(rows())
        assert torch.equal(model.linear.weight, first)
