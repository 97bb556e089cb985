"""Watching torch's losses: what is left alone, and where rows are selected before a mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.losses.model.intercept import Watch, selects

ROWS, CLASSES = 5, 3
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR)
OTHER = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR)
CLASS = torch.tensor([0, 2, -100, 1, 1])


@pytest.mark.filterwarnings("ignore:size_average")
def test_deprecated_reductions_are_left_to_the_model() -> None:
    with Watch() as watch:
        F.mse_loss(SCORES, OTHER, size_average=False)
    assert watch.found == []


@pytest.mark.parametrize(
    ("make", "picks"),
    ids=range(7),
    argvalues=[
        (lambda x: x.exp(), False),
        (lambda x: x[CLASS >= 0].exp(), True),
        (lambda x: x.masked_select(x > 0), True),
        (lambda x: x.index_select(0, CLASS.clamp(min=0)), True),
        (lambda x: x[:, torch.tensor([0, 2])], True),  # perhaps not, and then it costs nothing
        (lambda x: x[torch.arange(ROWS), CLASS.clamp(min=0)].exp(), False),  # one of each row
        (lambda x: x.gather(1, CLASS.clamp(min=0)[:, None]), False),
    ],
)
def test_what_stands_before_a_mean(make: Callable[..., Tensor], picks: bool) -> None:
    source: Any = make(SCORES.clone().requires_grad_() * 1).grad_fn
    assert selects(source) == picks


def test_padded_labels_are_noted() -> None:
    for pad, tensor, padded in [((0, 1), CLASS, True), ((1, 0), CLASS, False), ((0, 1), SCORES, False)]:
        with Watch() as watch:
            F.pad(tensor, pad, value=-100)
        assert watch.padded == padded
