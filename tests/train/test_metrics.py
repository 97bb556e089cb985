"""Metrics: exact on every cut, by one forward, and nothing else is any different afterwards."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from anybatch import Step, Terms, Total
from anybatch.testing import relative_error, tolerance
from anybatch.train.loader import Rows
from anybatch.train.metrics import RunningLoss, accuracy, evaluate
from tests.options import flat
from tests.snapshots import same_as_before
from tests.zoo import Made, Perceptron

ROWS = 11
X = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LIMIT = tolerance(torch.float64, terms=ROWS)
CLASS_WEIGHT = torch.tensor([1.0, 5.0, 0.25, 2.0], dtype=torch.float64)


TWO = "fit", "size"


def targets(masked: list[bool]) -> Tensor:
    """The first row always counts; the masked ones stand together, so that means of means go wrong."""
    y = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(1))
    return torch.where(torch.tensor([False, *masked]), -100, y)


UNEVEN = targets([False, True, True, True, False, False, False, True, False, False])


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "smoothed sum": partial(F.cross_entropy, label_smoothing=0.1, reduction="sum"),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@settings(max_examples=25)
@given(masked=st.lists(st.booleans(), min_size=ROWS - 1, max_size=ROWS - 1), cut=st.integers(1, ROWS + 1))
def test_loss_and_accuracy_are_those_of_all_rows_at_once(loss: Any, masked: list[bool], cut: int) -> None:
    torch.manual_seed(0)
    y, model = targets(masked), Perceptron(3, 4).double()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    found = evaluate(step, Rows((X, y), step), {"accuracy": accuracy}, micro_batch=cut, batch_size=4)
    scores, valid = model(X).detach(), y != -100
    assert relative_error(found["loss"], loss(scores, y)) <= LIMIT
    right = int((scores.argmax(1) == y)[valid].sum())
    assert found == {"loss": found["loss"], "accuracy": right / int(valid.sum())}


def named(model: nn.Module, micro: Any) -> dict[str, Total]:
    """Two terms that are divided by different weights, and one that has nothing to say about these rows."""
    x, y = micro
    scores, valid = model(x), y != -100
    return {
        "fit": Total(F.cross_entropy(scores, y, reduction="sum"), valid.sum()),
        "size": Total(scores.square().sum(), scores.numel()),
        "other": Total.zero(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_one_forward_per_micro_batch_and_all_as_before(fails: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.forwards += 1
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        return self.layers(x) + torch.rand(4) * random.random() * float(np.random.rand())

    def metric(scores: Tensor, y: Tensor) -> Total:
        met.append(len(y))
        if fails and len(met) == 3:
            raise ZeroDivisionError
        return Total(0, len(y))

    forwards, met = list[Any](), list[int]()  # not in an attribute, which an evaluation puts back
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    layers[1].eval()  # a layer that somebody froze
    optimizer, collate = torch.optim.SGD(layers.parameters(), lr=0.1), torch.utils.data.default_collate
    options = {"batch_norm": "micro", "collate": collate}
    model = Made(forward, forwards=0, layers=layers)
    model.register_forward_pre_hook(lambda model, args: forwards.append(args))
    step = Step(model, nn.CrossEntropyLoss(), optimizer, **flat(options))
    rows = Rows(list(zip(X.float(), UNEVEN, strict=True)), step)
    with same_as_before(step), pytest.raises(ZeroDivisionError) if fails else nullcontext():
        evaluate(step, rows, {"one": metric, "two": accuracy}, micro_batch=4, batch_size=4)
    assert (met, len(forwards)) == ([4, 4, 3], 3)


@pytest.mark.parametrize("size", [1, 4, 11])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=CLASS_WEIGHT), named, Terms(named, {"size": 0.5})]
)
def test_running_loss_is_that_of_all_rows(loss: Any, size: int) -> None:
    model = Perceptron(3, 4).double()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0))
    running = RunningLoss()
    for x, y in zip(X.split(size), UNEVEN.split(size), strict=True):
        running = RunningLoss(running.totals)  # as through a checkpoint
        running.add(step((x, y)))
    report = step((X, UNEVEN))
    assert relative_error(running.value(step.coefficients), report.loss) <= LIMIT
    found = evaluate(step, Rows((X, UNEVEN), step), {}, micro_batch=4, batch_size=size)
    assert relative_error(found["loss"], report.loss) <= LIMIT
    if "fit" in found:  # each term is divided by its own weight; a term of no weight is NaN
        assert math.isnan(found["other"])
        assert relative_error([found[one] for one in TWO], [report.terms[one] for one in TWO]) <= LIMIT
    assert math.isnan(RunningLoss().value({}))
