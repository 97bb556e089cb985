"""Forwards that write to their own rows, and a micro-batch that has to come again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Precision, Step
from anybatch.errors import NonFiniteLossError, OutOfMemoryError
from anybatch.run import Run
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


@pytest.mark.parametrize("fault", [NonFiniteLossError, OutOfMemoryError])
def test_the_first_time_it_is_said_and_then_rows_come_back(fault: type[Exception]) -> None:
    overflows = fault is NonFiniteLossError
    step, twin = make(SCALED if overflows else "float32"), make()
    first = step.model.layer.weight.detach().clone()
    refused: set[int] = set() if overflows else {3}
    with pytest.raises(fault, match="rows are not as before"), scarce(Run, "add", refused):
        step(rows())
    assert torch.equal(step.model.layer.weight, first)
    batch, other = rows(), rows()
    with scarce(Run, "add", refused):
        report = step(batch)
    assert report.redone > 0
    twin(other)
    assert torch.equal(batch[0], other[0])  # once, as without a fault
    limit = tolerance(torch.float16 if overflows else torch.float32, terms=8)
    assert relative_error(step.model.layer.weight, twin.model.layer.weight) <= limit


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
