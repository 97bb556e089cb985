"""Forwards that write to parameters or to their rows: put back, or said where nobody could know before."""

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import AnybatchError, Options, Precision, Step
from anybatch.core.errors import OutOfMemoryError, PlanError
from anybatch.engine import admit, carry_out
from tests.faults.scarce import scarce_in_passes
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot

ROWS = 16


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# ---- parameters


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


def make(make_model: Any, steps: int = 0) -> Step:
    """A step after some updates."""
    model = make_model()
    step = Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=4, options=Options(check=False))
    for _ in range(steps):
        step(batch_for(model))
    return step


WRITING = [(bounded, 0), (bounded, 4), (Momentum, 1), (Momentum, 4)]


@pytest.mark.parametrize(("make_model", "steps"), WRITING)
def test_all_is_put_back_where_nothing_fits(make_model: Any, steps: int) -> None:
    step = make(make_model, steps)
    none_fits = scarce_in_passes(set(range(12, 10_000)))
    with same_as_before(step), none_fits, pytest.raises(OutOfMemoryError):
        step(batch_for(step.model))


@pytest.mark.parametrize(("make_model", "steps"), WRITING)
@pytest.mark.parametrize("at", [3, 7, 12, 20])
def test_a_redone_micro_batch_finds_what_it_found(make_model: Any, steps: int, at: int) -> None:
    step, twin = make(make_model, steps), make(make_model, steps)
    batch = batch_for(step.model)
    with scarce_in_passes({at}):
        report = step(batch)
    task = twin.task()
    task.effects.begin(task.network.modules)
    plan = replace(twin.plan(ROWS), cut=report.cut, micro_batch=max(report.cut))
    assert carry_out(plan, task, admit(batch, task, None)).loss == report.loss
    assert_same(snapshot(twin), snapshot(step))


def test_the_very_first_time_it_is_said_and_a_step_does_not_begin_again_from_other_parameters() -> None:
    step = make(Momentum)
    with scarce_in_passes({3}), pytest.raises(OutOfMemoryError, match="not as before: load them again"):
        step(batch_for(step.model))
    key = step.model.get_parameter("key.weight")
    assert [one is key for one in step.effects.parameters] == [True]
    with scarce_in_passes({0, 1, 2, 20, 21, 22, 23}), pytest.raises(OutOfMemoryError):
        make(Momentum)(batch_for(step.model))


@pytest.mark.parametrize("make_model", [bounded, Momentum, Counted])
def test_planning_changes_no_parameter(make_model: Any) -> None:
    step = make(make_model)
    batch, options = batch_for(step.model), {"memory": "1GiB"}
    with same_as_before(step), suppress(PlanError):  # a count cannot be traced
        ab.plan(step.model, nn.CrossEntropyLoss(), step.optimizers, batch, **flat(options))


# ---- rows


SCALED = Precision(compute="float16", loss_scale=2.0**14)


class InPlace(nn.Linear):
    """Adds 1 to its rows where they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


@pytest.mark.parametrize(("fault", "steps"), [("overflow", 0), ("memory", 0), ("memory", 4)])
def test_rows_that_are_not_as_before_are_told_and_no_update_is_made(fault: str, steps: int) -> None:
    model = InPlace(4, 1)
    precision = SCALED if fault == "overflow" else "float32"
    step = Step(
        model,
        nn.MSELoss(),
        sgd(model, 1e-4),
        micro_batch=4,
        precision=precision,
        options=Options(check=False),
    )
    rows = lambda: (torch.zeros(8, 4), torch.full((8, 1), 40.0))  # noqa: E731
    for _ in range(steps):
        step(rows())
    first = model.weight.detach().clone()
    for _ in range(2):
        with (
            pytest.raises(AnybatchError, match=r"rows are not as before: hand them over anew, .*x\.clone"),
            scarce_in_passes({3} if fault == "memory" else set()),
        ):
            step(rows())
        assert torch.equal(model.weight, first)


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
