"""Watching torch's losses: what is noted, what is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anybatch.losses.model.intercept import Watch, selects
from anybatch.testing import relative_error, tolerance

ROWS, CLASSES = 5, 3
LIMIT = tolerance(torch.float64, ROWS)
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR)
OTHER = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR)
CLASS = torch.tensor([0, 2, -100, 1, 1])
WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
MEAN, SUM = ("mean", False), ("sum", True)


@pytest.mark.parametrize(
    ("call", "noted"),
    ids=range(16),
    argvalues=[
        (Tensor.mean, [MEAN]),
        (torch.mean, [MEAN]),
        (lambda x: x.mean(dim=(0, 1)), [MEAN]),
        (lambda x: torch.mean(input=x), [MEAN]),
        (lambda x: x[0].mean(0), [MEAN]),
        (lambda x: x.mean(0), []),
        (lambda x: x.mean(1, keepdim=True), []),
        (lambda x: x[0, 0].mean(), []),
        (Tensor.sum, [SUM]),
        (torch.sum, [SUM]),
        (lambda x: x.sum((0, 1)), [SUM]),
        (lambda x: x.sum(0), []),
        (lambda x: (x > 0).sum(), []),
        (lambda x: x.detach().sum(), []),
        (lambda x: F.mse_loss(x, OTHER, reduction="none"), []),
        (lambda x: F.mse_loss(x, OTHER, weight=OTHER.exp().requires_grad_()), []),  # left to the model
    ],
)
def test_full_means_and_sums_are_noted_and_stay_as_they_are(
    call: Callable[..., Tensor], noted: list[Any]
) -> None:
    x = SCORES.clone().requires_grad_()
    with Watch() as watch:
        value = call(x)
    assert torch.equal(value, call(x))
    assert [(one.name, one.is_sum) for one in watch.found] == noted
    assert all(relative_error(one.sum / one.weight, value) <= LIMIT for one in watch.found)


@pytest.mark.filterwarnings("ignore:size_average")
def test_deprecated_reductions_are_left_to_the_model() -> None:
    with Watch() as watch:
        F.mse_loss(SCORES, OTHER, size_average=False)
    assert watch.found == []


def test_a_mean_of_losses_is_not_another_loss() -> None:
    x = SCORES.clone().requires_grad_()
    with Watch() as watch:
        torch.stack([F.mse_loss(x, OTHER), x.square().mean()]).mean()
    assert [noted.name for noted in watch.found] == ["mse_loss", "mean"]


def test_a_mean_of_nothing_is_zero() -> None:
    x = SCORES.clone().requires_grad_()
    with Watch() as watch:
        value = F.cross_entropy(x, torch.full((ROWS,), -100))
    assert value.item() == 0
    assert int(watch.found[0].weight) == 0
    assert not torch.autograd.grad(value, x)[0].any()


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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_a_checkpoint_the_call_stays_as_it_is(reduction: str) -> None:
    """It runs again in the backward, where nobody watches."""
    x = SCORES.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(x, CLASS, reduction="sum"), x)
    with Watch() as watch:
        checkpoint(lambda x: F.cross_entropy(x, CLASS, reduction=reduction), x, use_reentrant=False)
    (noted,) = watch.found
    assert noted.origin.classes == CLASSES
    (found,) = torch.autograd.grad(noted.sum, x)
    assert relative_error(found, expected) <= LIMIT


def test_settings_that_must_stay_the_same() -> None:
    """All that is neither compared nor, entry by entry, of a row."""

    def fixed(call: Callable[[], Tensor]) -> list[str]:
        with Watch() as watch:
            call()
        return [name for name, value in watch.found[0].fixed.items() if value is not None]

    rows = OTHER.sigmoid()
    assert fixed(lambda: F.cross_entropy(SCORES, CLASS, WEIGHTS)) == [
        "weight",
        "ignore_index",
        "label_smoothing",
    ]
    binary = F.binary_cross_entropy_with_logits
    assert fixed(lambda: binary(SCORES, rows, weight=rows)) == []
    assert fixed(lambda: binary(SCORES, rows, weight=WEIGHTS, pos_weight=rows)) == ["weight"]
    assert fixed(lambda: F.smooth_l1_loss(SCORES, rows, beta=2.0)) == ["beta"]
    distance = F.triplet_margin_with_distance_loss
    assert fixed(
        lambda: distance(SCORES, rows, -rows, distance_function=lambda a, b: (a - b).norm(dim=1))
    ) == [
        "margin",
        "swap",
    ]


def test_forgetting_lets_the_graph_go_and_keeps_settings_as_they_are() -> None:
    weight = WEIGHTS.clone()
    x = SCORES.clone().requires_grad_()
    with Watch() as watch:
        F.binary_cross_entropy_with_logits(x[CLASS >= 0], OTHER.sigmoid()[CLASS >= 0], weight=weight)
    (noted,) = watch.found
    kept = noted.forgotten()
    weight.zero_()
    assert (kept.node, kept.source, kept.value.requires_grad, kept.picks) == (None, None, False, True)
    assert torch.equal(kept.fixed["weight"], WEIGHTS)
