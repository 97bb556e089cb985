"""Forwards that write to parameters or to their rows: put back, or said where nobody could know before."""

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch import AnybatchError, Options, Precision, Step
from anybatch.core.errors import OutOfMemoryError, PlanError
from anybatch.engine import admit, carry_out
from tests.faults.scarce import scarce_in_passes
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Made, momentum

ROWS = 16


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# ---- parameters


def counted() -> nn.Module:
    """Shapes depend on values, so that it cannot be traced."""
    model = momentum()
    model.register_forward_hook(
        lambda _, args, out: out + args[0][: int((args[0][:, 0] > 0).sum())].sum() * 0
    )
    return model


def bounded() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(32, 4))


def make(make_model: Any, steps: int = 0) -> tuple[Step, Any]:
    """A step after some updates, and its batch."""
    torch.manual_seed(0)
    model = make_model()
    batch = (
        torch.randint(20, (ROWS, 4)) if make_model is bounded else torch.randn(ROWS, 6),
        torch.randint(4, (ROWS,)),
    )
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


def test_the_very_first_time_it_is_said_and_a_step_does_not_begin_again_from_other_parameters() -> None:
    step, batch = make(momentum)
    with scarce_in_passes({3}), pytest.raises(OutOfMemoryError, match="not as before: load them again"):
        step(batch)
    key = step.model.get_parameter("key.weight")
    assert [one is key for one in step.effects.parameters] == [True]
    step, batch = make(momentum)
    with scarce_in_passes({0, 1, 2, 20, 21, 22, 23}), pytest.raises(OutOfMemoryError):
        step(batch)


@pytest.mark.parametrize("make_model", [bounded, momentum, counted])
def test_planning_changes_no_parameter(make_model: Any) -> None:
    step, batch = make(make_model)
    with same_as_before(step), suppress(PlanError):  # a count cannot be traced
        ab.plan(step.model, nn.CrossEntropyLoss(), step.optimizers, batch, **flat({"memory": "1GiB"}))


# ---- rows


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


@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
@pytest.mark.parametrize("kind", ["expanded", "of a file", "with gradient"])
def test_rows_that_cannot_be_written_to_are_left_alone(kind: str, policy: str, tmp_path: Path) -> None:
    """Nobody has changed them: they may be one row many times, or a file that can only be read."""
    x, y = torch.full((8, 4), 2.0), torch.full((8, 1), 40.0 if policy == "raise" else torch.inf)
    if kind == "expanded":
        x, y = x[:1].expand(8, 4), y[:1].expand(8, 1)
    elif kind == "of a file":
        np.save(tmp_path / "rows.npy", x.numpy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            x = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    else:
        x.requires_grad_()
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"precision": SCALED} if policy == "raise" else {"non_finite": policy}
    report = Step(model, nn.MSELoss(), sgd(model, 1e-4), micro_batch=4, **flat(options))((x, y))
    assert (report.redone > 0, report.updated) == (policy == "raise", policy == "raise")
    assert report.dropped == 8 * (policy == "drop")
