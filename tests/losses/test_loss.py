"""Every kind of loss answers what a step asks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Terms, Total
from anybatch.core.batch import OpenBatch, SampleBatch, TensorBatch
from anybatch.losses.loss import Evaluated, Loss
from anybatch.losses.resolve import resolve

BATCH = torch.ones(6, 3), torch.tensor([0, 1, -100, 1, 0, -100])
SAMPLES = [(x, y) for x, y in zip(*BATCH, strict=True)]
ASKED = [name for name in vars(Loss) if not name.startswith("_")]


def total(model: nn.Module, micro: Any) -> Total:
    return Total(F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), (micro[1] != -100).sum())


LOSSES: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "total": total,
    "terms": Terms(total, weight=lambda batch: (batch[1] != -100).sum()),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_all_questions_are_answered(loss: Any) -> None:
    assert ASKED == [
        "divided",
        "counted",
        "tied",
        "is_plain",
        "coefficients",
        "evaluate",
        "divisors",
        "uncut",
        "along",
    ]
    assert all(hasattr(resolve(loss), name) for name in ASKED)
    assert all(hasattr(resolve(loss).uncut(), name) for name in ASKED)


def first(loss: Loss, rows: int) -> Evaluated:
    return loss.evaluate(nn.Linear(3, 2), (BATCH[0][:rows], BATCH[1][:rows]))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_micro_batch_weighs_its_valid_targets(loss: Any) -> None:
    for rows, weight in ((6, 4), (3, 2), (1, 1)):
        evaluated = first(resolve(loss), rows)
        assert {name: int(value) for name, value in evaluated.weigh().items()} == {"loss": weight}
        assert evaluated.sums["loss"].requires_grad


@pytest.mark.parametrize(
    ("name", "early"), [("module", True), ("function", True), ("total", False), ("terms", True)]
)
def test_divisors_are_known_early_or_late(name: str, early: bool) -> None:
    loss = resolve(LOSSES[name])
    divisors = loss.divisors(TensorBatch(BATCH), first(loss, 2), 2)
    assert divisors == ({"loss": 4} if early else None)
    assert loss.divisors(TensorBatch(BATCH), first(loss, 6), 6) == {"loss": 4}  # uncut
    assert loss.divisors(OpenBatch(), first(loss, 2), 2) is None  # a window


@pytest.mark.parametrize("name", ["module", "function", "total"])
def test_targets_of_samples_are_counted_as_they_come(name: str) -> None:
    loss = resolve(LOSSES[name])
    assert loss.divisors(SampleBatch(SAMPLES, torch.utils.data.default_collate), first(loss, 2), 2) is None


def test_rows_tell_the_divisor_of_a_mean_over_elements() -> None:
    loss, x, y = resolve(nn.MSELoss()), torch.ones(6, 3), torch.ones(6, 2)
    evaluated = loss.evaluate(nn.Linear(3, 2), (x[:2], y[:2]))
    assert loss.divisors(TensorBatch((x, y)), evaluated, 2) == {"loss": 12}
    assert loss.divisors(OpenBatch(), evaluated, 2) is None
