"""What can be a loss, how batches are read, and what is refused with the way out."""

from collections import UserDict, namedtuple
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Step, Total
from anybatch.core.errors import LossError
from anybatch.losses.inputs import TARGET_KEYS, split_batch
from anybatch.losses.resolve import check_loss, resolve


class OwnModule(nn.Module):
    def forward(self, model: nn.Module, micro: Any) -> Total:
        return Total(model(micro).sum(), len(micro))


TWO_LINES = (
    'losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")\n'
    "    return ab.Total(losses.sum(), losses.numel())"
)
TRAINED = nn.Parameter(torch.ones(3))
LOGITS = F.binary_cross_entropy_with_logits
REFUSED: list[tuple[Any, str, str]] = [
    (nn.AdaptiveLogSoftmaxWithLoss(8, 4, [2]), "got AdaptiveLogSoftmaxWithLoss, a module", TWO_LINES),
    (OwnModule(), "got OwnModule, a module of your own", "ab.Terms"),
    (F.softplus, "got F.softplus", TWO_LINES),
    (partial(nn.MSELoss, reduction="sum"), "got the class MSELoss", "Call it"),
    (nn.MSELoss(reduction="none"), "got 'none'", "or pass it in ab.PerRow(...)"),
    (partial(F.mse_loss, reduce=True, size_average=True), "deprecated size_average and reduce", "Write"),
    (partial(F.cross_entropy, torch.zeros(1)), "got positional (tensor([0.]", "Name them"),
    (nn.CrossEntropyLoss(TRAINED), "`weight` of CrossEntropyLoss without gradient", "Use .detach()"),
]


@pytest.mark.parametrize(("loss", "got", "todo"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_summed_is_refused(loss: Any, got: str, todo: str) -> None:
    model = nn.Linear(3, 3)
    for refuse in (resolve, lambda loss: Step(model, loss, torch.optim.SGD(model.parameters()))):
        with pytest.raises(LossError) as caught:
            refuse(loss)
        assert got in str(caught.value)
        assert todo in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_weights_that_no_sum_can_have_are_refused_at_the_door(name: str, bad: float) -> None:
    weight = torch.tensor([1.0, bad, 2.0])
    for loss in (nn.BCEWithLogitsLoss(**{name: weight}), partial(LOGITS, **{name: weight})):
        with pytest.raises(LossError, match=f"`{name}` of .* finite and at least 0, got values from"):
            check_loss(loss)
    check_loss(nn.BCEWithLogitsLoss(**{name: weight.nan_to_num(0, 0, 0).abs()}))


Pair = namedtuple("Pair", "image label")

READINGS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    ((1, 2), 1, (2,)),
    ([1, 2], 1, (2,)),  # as loaders collate it
    (Pair(1, 2), 1, (2,)),
    (((1, 2), 3), (1, 2), (3,)),
    (({"a": 1}, 3), {"a": 1}, (3,)),
    ((1, 2, 3), (1, 2), (3,)),
    ((1, 2, (3, 4)), (1, 2), (3, 4)),
    ((1,), 1, ()),
    ({"a": 1, "b": 2, "target": 3}, {"a": 1, "b": 2}, (3,)),
    (UserDict({"a": 1, "labels": 3}), {"a": 1}, (3,)),
    *[({"x": 1, key: 2}, {"x": 1}, (2,)) for key in TARGET_KEYS],
]
WHOLE = [((1, 2, 3), (1, 2, 3)), ([1, 2, 3], (1, 2, 3)), ((1,), 1), ({"a": 1, "y": 2}, {"a": 1, "y": 2})]


def test_a_batch_is_read() -> None:
    for micro, inputs, targets in READINGS:
        assert split_batch(micro) == (inputs, targets)
    for micro, inputs in WHOLE:
        assert split_batch(micro, has_target=False) == (inputs, ())
