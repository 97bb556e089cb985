"""Looking at whether a loss adds up keeps to the budget, and its bytes are foretold."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import ModelLoss, Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import BudgetError, LossError
from anybatch.losses.additivity import compare_cuts
from anybatch.memory.meter import Meter
from anybatch.step.guard import bytes_of_look, has_room
from anybatch.testing import Transformer


class Own(Transformer):
    """It computes its own loss."""

    def __init__(self) -> None:
        super().__init__(200, width=16)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        scores = super().forward(tokens)
        return scores if labels is None else {"loss": F.cross_entropy(scores, labels)}


def by_tokens(model: nn.Module, micro: dict[str, Tensor]) -> Total:
    scores, labels = model(micro["tokens"]), micro["labels"]
    return Total(F.cross_entropy(scores, labels, reduction="sum"), labels.numel())


LOSSES = {"own function": by_tokens, "the model's": ModelLoss()}


def tokens(rows: int = 8) -> dict[str, Tensor]:
    return {"tokens": torch.randint(1, 200, (rows, 12)), "labels": torch.randint(200, (rows, 12))}


def make(loss: str, **options: Any) -> Step:
    torch.manual_seed(0)
    model = Own()
    return Step(model, LOSSES[loss], torch.optim.AdamW(model.parameters()), **options)


def peak_of(step: Step, run: Any, batch: dict[str, Tensor]) -> int:
    with Meter(step.model, step.optimizers, batch_leaves=batch.values()) as meter:
        run()
    return meter.peak


@pytest.mark.parametrize("share", [1.0, 1.1, 1.3, 2.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_cut_step_keeps_to_the_budget(loss: str, share: float) -> None:
    batch = tokens()
    with pytest.raises(BudgetError) as refused:
        make(loss, memory=1)(batch)
    budget = int(share * refused.value.smallest)
    step = make(loss, memory=budget)
    for _ in range(3):
        assert peak_of(step, lambda: step(batch), batch) <= budget


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_bytes_of_a_look_are_foretold(loss: str, rows: int) -> None:
    step, batch = make(loss), tokens()
    step(batch)  # the optimizer's state is there
    task, logical = step.task(), TensorBatch(batch)
    for parameter in task.parameters:
        parameter.grad = None
    few = logical.head(rows)
    measured = peak_of(step, lambda: compare_cuts(task.loss, task.model, task.modules, few), batch)
    assert bytes_of_look(task, logical, rows) == measured


def test_what_cannot_be_traced_is_looked_at_with_as_few_rows_as_tell_anything() -> None:
    def mean_of_means(model: nn.Module, micro: dict[str, Tensor]) -> Total:
        valid = (micro["labels"] > 0).nonzero()[:, 0]  # as many as there are
        return Total(model(micro["tokens"])[valid].mean(), 1)

    model = Own()
    step = Step(model, mean_of_means, torch.optim.AdamW(model.parameters()), memory="1GiB")
    task, logical = step.task(), TensorBatch(tokens())
    assert [has_room("1GiB", task, logical, 1, rows) for rows in (8, 4, 3)] == [False, False, True]
    assert [has_room("1GiB", task, logical, 5, rows) for rows in (8, 5, 4)] == [False, True, True]
    with pytest.raises(LossError):
        step.guard.check_loss(task, logical, 1)
