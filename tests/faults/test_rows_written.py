"""Forwards that write to their own rows, and a micro-batch that has to come again."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step, Total
from anybatch.core.errors import OutOfMemoryError
from anybatch.engine.run import Run
from anybatch.state.snapshot import FIRST
from anybatch.testing import relative_error, tolerance
from tests.faults.scarce import scarce

SCALED = Precision(compute="float16", loss_scale=2.0**14)


class InPlace(nn.Module):
    """Adds 1 to its rows where they lie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1.0))


def make(precision: Any = "float32") -> Step:
    model = InPlace()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return Step(model, nn.MSELoss(), optimizer, micro_batch=4, precision=precision)


def rows() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 4), torch.full((8, 1), 40.0)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_overflow_finds_the_rows_as_they_were(steps: int) -> None:
    step, twin = make(SCALED), make()
    for _ in range(steps + 1):
        batch, other = rows(), rows()
        assert step(batch).redone > 0
        twin(other)
        assert torch.equal(batch[0], other[0])  # once, as without a fault
    limit = tolerance(torch.float16, terms=8)
    assert relative_error(step.model.layer.weight, twin.model.layer.weight) <= limit


@dataclass
class Rows:
    """A batch with names."""

    x: Tensor
    y: Tensor


@pytest.mark.parametrize("fault", ["overflow", "memory"])
@pytest.mark.parametrize("size", [None, 4])
def test_rows_in_a_dataclass_come_back_too(size: int | None, fault: str) -> None:
    def loss(model: nn.Module, rows: Rows) -> Total:
        return Total((model(rows.x) - rows.y).square().sum(), len(rows.x))

    def make(precision: Any) -> Step:
        model = InPlace()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return Step(model, loss, optimizer, micro_batch=size, precision=precision, check=False)

    step, twin = make(SCALED if fault == "overflow" else "float32"), make("float32")
    if fault == "memory":
        step(Rows(*rows()))  # learns that they are written to
        twin(Rows(*rows()))
    batch, other = Rows(*rows()), Rows(*rows())
    with scarce(Run, "add", {3} if fault == "memory" else set()):
        assert step(batch).redone > 0
    twin(other)
    assert torch.equal(batch.x, other.x)
    limit = tolerance(torch.float16, terms=8)
    assert relative_error(step.model.layer.weight, twin.model.layer.weight) <= limit


def test_where_nobody_could_know_it_is_said() -> None:
    step = make()
    first = step.model.layer.weight.detach().clone()
    with pytest.raises(OutOfMemoryError, match="rows are not as before"), scarce(Run, "add", {3}):
        step(rows())
    assert torch.equal(step.model.layer.weight, first)
    with scarce(Run, "add", {3}):
        assert step(rows()).redone == 1


def test_a_step_that_looks_learns_it_without_any_fault() -> None:
    step = make()
    step(rows())
    assert step.guard.streams.are_rows_written
    batch, other = rows(), rows()
    with scarce(Run, "add", {7}):
        report = step(batch)
    assert report.redone == 1
    make()(other)
    assert torch.equal(batch[0], other[0])


def test_a_forward_that_begins_to_write_is_said_once_and_then_known() -> None:
    step = make()
    model = step.model
    handle = model.register_forward_pre_hook(lambda _, args: (args[0].clone(),))
    for _ in range(FIRST + 1):
        step(rows())
    assert not step.guard.streams.are_rows_written
    handle.remove()
    with pytest.raises(OutOfMemoryError, match="From now on they are noted"), scarce(Run, "add", {3}):
        step(rows())
    with scarce(Run, "add", {3}):
        assert step(rows()).redone == 1


@pytest.mark.parametrize("policy", ["raise", "drop", "skip"])
@pytest.mark.parametrize("kind", ["expanded", "of a file", "with gradient", "sparse"])
def test_rows_that_cannot_be_written_to_are_left_alone(kind: str, policy: str, tmp_path: Path) -> None:
    """Nobody has changed them: they may be one row many times, or a file that can only be read."""
    x, y = torch.full((8, 4), 2.0), torch.full((8, 1), 40.0)
    if kind == "expanded":
        x, y = torch.full((1, 4), 2.0).expand(8, 4), torch.full((1, 1), 40.0).expand(8, 1)
    elif kind == "of a file":
        np.save(tmp_path / "rows.npy", x.numpy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            x = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    elif kind == "sparse":
        x = x.to_sparse()
    else:
        x.requires_grad_()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"precision": SCALED} if policy == "raise" else {"non_finite": policy}
    size = None if kind == "sparse" else 4
    step = Step(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-4), micro_batch=size, **options
    )
    if policy != "raise":
        y = torch.full((8, 1), torch.inf)
    report = step((x, y))
    assert (report.redone > 0, report.updated) == (policy == "raise", policy == "raise")
    assert report.dropped == 8 * (policy == "drop")
    assert not step.guard.streams.are_rows_written


def test_rows_written_to_through_their_data_come_back() -> None:
    """Which tells no version."""

    class Behind(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            x.data.add_(1.0)
            return self.layer(x)

    model = Behind()
    step = Step(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-4), micro_batch=4, precision=SCALED
    )
    batch = rows()
    assert step(batch).redone > 0
    assert torch.equal(batch[0], torch.ones(8, 4))
