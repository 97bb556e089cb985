"""What must hold before a batch is cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Step, Total
from anybatch.batch import TensorBatch
from anybatch.errors import LossError, PlanError

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
        step.guard.before_cut(step._task(), TensorBatch(BATCH), 4)
    allowed = make(nn.MSELoss(), norm, batch_norm="micro")
    allowed.guard.before_cut(allowed._task(), TensorBatch(BATCH), 4)


def test_a_loss_that_does_not_add_up_is_refused_once_looked_at() -> None:
    step = make(mean_of_means)
    with pytest.raises(LossError):
        step.guard.check_loss(step._task(), TensorBatch(BATCH), 4)
    trusting = make(mean_of_means, check=False)
    trusting.guard.check_loss(trusting._task(), TensorBatch(BATCH), 4)


def test_where_memory_is_scarce_the_look_takes_no_more_rows_than_a_micro_batch_or_three() -> None:
    most: dict[bool, int] = {}

    def fit(model: nn.Module, micro: tuple[torch.Tensor, torch.Tensor]) -> Total:
        losses = F.mse_loss(model(micro[0]), micro[1], reduction="none").sum(1)
        most[scarce] = max(most.get(scarce, 0), len(losses))
        return Total(losses.sum(), len(losses))

    for scarce in (False, True):
        options: dict[str, object] = {"memory": "1GiB"} if scarce else {}
        step = make(fit, **options)
        step.guard.check_loss(step._task(), TensorBatch(BATCH), 2)
    assert most == {False: 8, True: 3}
