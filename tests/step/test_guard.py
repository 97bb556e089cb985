"""What must hold before a batch is cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import LossError, PlanError

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


@pytest.mark.parametrize(("micro_batch", "most"), [(1, 3), (5, 5)])
def test_within_a_budget_no_more_rows_are_looked_at_than_a_micro_batch_has(
    micro_batch: int, most: int
) -> None:
    seen = [0]

    def fit(model: nn.Module, micro: tuple[torch.Tensor, torch.Tensor]) -> Total:
        seen.append(len(micro[0]))
        return Total(F.mse_loss(model(micro[0]), micro[1], reduction="sum"), len(micro[0]))

    step = make(fit, memory="1GiB")
    step.guard.check_loss(step.task(), TensorBatch(BATCH), micro_batch)
    assert max(seen) == most
