"""What must hold before a batch is cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch import Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import LossError, PlanError
from anybatch.step.guard import bytes_of_look

BATCH = torch.randn(8, 2), torch.randn(8, 1)


def make(loss: object, model: nn.Module | None = None, **options: object) -> Step:
    model = nn.Linear(2, 1) if model is None else model
    return Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), **options)  # type: ignore[arg-type]


def mean_of_means(model: nn.Module, micro: tuple[torch.Tensor, torch.Tensor]) -> Total:
    return Total(F.mse_loss(model(micro[0]), micro[1]), 1)


def test_meetings_are_refused_unless_something_was_chosen() -> None:
    norm = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    step = make(nn.MSELoss(), norm)
    with pytest.raises(PlanError, match="BatchNorm"):
        step.guard.before_cut(step.task(), TensorBatch(BATCH), 4)
    allowed = make(nn.MSELoss(), norm, batch_norm="micro")
    allowed.guard.before_cut(allowed.task(), TensorBatch(BATCH), 4)


def test_a_loss_that_does_not_add_up_is_refused_once_looked_at() -> None:
    step = make(mean_of_means)
    with pytest.raises(LossError):
        step.guard.check_loss(step.task(), TensorBatch(BATCH), 4)
    trusting = make(mean_of_means, check=False)
    trusting.guard.check_loss(trusting.task(), TensorBatch(BATCH), 4)


def contrast(model: nn.Module, micro: tuple[torch.Tensor, torch.Tensor]) -> Total:
    """Every element of the outputs beside each other one, for a moment."""
    outputs = model(micro[0]).flatten()
    pairs = (outputs[:, None] * outputs).sum() - outputs.sum().square()
    return Total(F.mse_loss(outputs, micro[1].flatten(), reduction="sum") + pairs, len(outputs))


@pytest.mark.parametrize(("rows", "most"), [(8, 8), (3, 3), (2, 0)])
def test_within_a_budget_no_more_rows_are_looked_at_than_fit(rows: int, most: int) -> None:
    seen = [0]

    def fit(model: nn.Module, micro: tuple[torch.Tensor, torch.Tensor]) -> Total:
        if not isinstance(micro[0], FakeTensor):
            seen.append(len(micro[0]))
        return contrast(model, micro)

    step = make(fit)
    room = bytes_of_look(step.task(), TensorBatch(BATCH), rows)
    bounded = make(fit, step.model, memory=room)
    bounded.guard.check_loss(bounded.task(), TensorBatch(BATCH), 1)
    assert max(seen) == most
