"""Watching torch's losses: what is noted, what is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.losses.kinds import FUNCTIONS
from anybatch.losses.reductions import Watch, compares_rows, folds_rows, selects, widened
from anybatch.testing import relative_error, tolerance

ROWS, CLASSES = 5, 3
LIMIT = tolerance(torch.float64, ROWS)
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR)
OTHER = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR)
CLASS = torch.tensor([0, 2, -100, 1, 1])
SIGNS = torch.tensor([1.0, -1, 1, 1, -1], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
TIME = torch.randn(6, ROWS, CLASSES, dtype=torch.float64, generator=GENERATOR).log_softmax(-1)

Call = Callable[..., Tensor]
CALLS: dict[str, Call] = {
    "cross_entropy": lambda x, **how: F.cross_entropy(x, CLASS, **how),
    "cross_entropy, weighted": lambda x, **how: F.cross_entropy(x, CLASS, WEIGHTS, **how),
    "cross_entropy, soft": lambda x, **how: F.cross_entropy(x, OTHER.softmax(1), **how),
    "nll_loss": lambda x, **how: F.nll_loss(x.log_softmax(1), CLASS, **how),
    "binary_cross_entropy": lambda x, **how: F.binary_cross_entropy(x.sigmoid(), OTHER.sigmoid(), **how),
    "binary_cross_entropy_with_logits": lambda x, **how: F.binary_cross_entropy_with_logits(
        x, OTHER.sigmoid(), weight=WEIGHTS, **how
    ),
    "mse_loss": lambda x, **how: F.mse_loss(x, OTHER, **how),
    "l1_loss": lambda x, **how: F.l1_loss(x, OTHER, **how),
    "smooth_l1_loss": lambda x, **how: F.smooth_l1_loss(x, OTHER, **how),
    "huber_loss": lambda x, **how: F.huber_loss(x, OTHER, **how),
    "soft_margin_loss": lambda x, **how: F.soft_margin_loss(x, OTHER.sign(), **how),
    "hinge_embedding_loss": lambda x, **how: F.hinge_embedding_loss(x, OTHER.sign(), **how),
    "margin_ranking_loss": lambda x, **how: F.margin_ranking_loss(x, OTHER, OTHER.sign(), **how),
    "poisson_nll_loss": lambda x, **how: F.poisson_nll_loss(x, OTHER.exp(), **how),
    "gaussian_nll_loss": lambda x, **how: F.gaussian_nll_loss(x, OTHER, OTHER.exp(), **how),
    "kl_div": lambda x, **how: F.kl_div(x.log_softmax(1), OTHER.softmax(1), **how),
    "ctc_loss": lambda x, **how: F.ctc_loss(
        (TIME + x).log_softmax(-1),
        torch.ones(ROWS, 2, dtype=torch.int64),
        torch.full((ROWS,), 6),
        torch.tensor([1, 2, 1, 2, 2]),
        **how,
    ),
    "cosine_embedding_loss": lambda x, **how: F.cosine_embedding_loss(x, OTHER, SIGNS, **how),
    "triplet_margin_loss": lambda x, **how: F.triplet_margin_loss(x, OTHER, -OTHER, **how),
    "triplet_margin_with_distance_loss": lambda x, **how: F.triplet_margin_with_distance_loss(
        x, OTHER, -OTHER, **how
    ),
    "multi_margin_loss": lambda x, **how: F.multi_margin_loss(x, CLASS.clamp(min=0), **how),
    "multilabel_margin_loss": lambda x, **how: F.multilabel_margin_loss(
        x, CLASS[:, None].expand(ROWS, CLASSES).clamp(min=-1), **how
    ),
    "multilabel_soft_margin_loss": lambda x, **how: F.multilabel_soft_margin_loss(
        x, OTHER.sigmoid().round(), **how
    ),
}
NEWER = {"linear_cross_entropy"}  # than the oldest torch we support; the same kind as cross_entropy


def test_every_known_loss_is_here() -> None:
    assert {name.split(",")[0] for name in CALLS} | NEWER >= {function.__name__ for function in FUNCTIONS}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_sum_over_weight_is_the_loss(name: str, reduction: str) -> None:
    x = SCORES.clone().requires_grad_()
    own = CALLS[name](x, reduction=reduction)
    with Watch() as watch:
        given = CALLS[name](x, reduction=reduction)
    (noted,) = watch.found
    assert noted.name == name.split(",")[0]
    assert relative_error(given, own) <= LIMIT
    assert relative_error(noted.sum / noted.weight, own) <= LIMIT
    assert noted.is_sum == (reduction == "sum")
    expected, found = torch.autograd.grad(own, x)[0], torch.autograd.grad(noted.sum / noted.weight, x)[0]
    assert relative_error(found, expected) <= LIMIT


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_as_is_nothing_changes(name: str) -> None:
    x = SCORES.clone().requires_grad_()
    with Watch(as_is=True) as watch:
        given = CALLS[name](x, reduction="mean")
    assert torch.equal(given, CALLS[name](x, reduction="mean"))
    with Watch() as other:
        CALLS[name](x, reduction="mean")
    assert float(watch.found[0].weight) == float(other.found[0].weight)


@pytest.mark.parametrize("name", CALLS)
def test_unreduced_losses_are_left_alone(name: str) -> None:
    with Watch() as watch:
        CALLS[name](SCORES, reduction="none")
    assert watch.found == []


@pytest.mark.parametrize(
    "mean",
    ids=range(5),
    argvalues=[
        Tensor.mean,
        torch.mean,
        lambda x: x.mean(dim=(0, 1)),
        lambda x: torch.mean(input=x),
        lambda x: x[0].mean(0),
    ],
)
def test_full_means_are_noted(mean: Call) -> None:
    with Watch() as watch:
        value = mean(SCORES)
    assert torch.equal(value, mean(SCORES))
    (noted,) = watch.found
    assert relative_error(noted.sum / noted.weight, value) <= LIMIT


@pytest.mark.parametrize(
    "mean",
    ids=range(3),
    argvalues=[lambda x: x.mean(0), lambda x: x.mean(1, keepdim=True), lambda x: x[0, 0].mean()],
)
def test_other_means_are_not(mean: Call) -> None:
    with Watch() as watch:
        mean(SCORES)
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


def test_adding_in_place_leaves_what_was_noted() -> None:
    x = SCORES.clone().requires_grad_()
    with Watch() as watch:
        loss = F.mse_loss(x, OTHER)
        before = loss.item()
        loss += 1
    assert watch.found[0].value.item() == before


def test_modules_and_calls_inside_calls() -> None:
    with Watch() as watch:
        nn.CrossEntropyLoss()(SCORES, CLASS)
        nn.MultiLabelSoftMarginLoss()(SCORES, OTHER.sigmoid().round())  # takes a mean inside
    assert [noted.name for noted in watch.found] == ["cross_entropy", "multilabel_soft_margin_loss"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.mse_loss(x, OTHER, size_average=False),
        lambda x: F.mse_loss(x, OTHER, weight=OTHER.exp().requires_grad_()),
    ],
    ids=["deprecated", "trained weight"],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_unusual_calls_are_left_to_the_model(call: Call) -> None:
    with Watch() as watch:
        call(SCORES)
    assert watch.found == []


def test_short_dtypes_are_added_up_in_float32() -> None:
    x = SCORES.half()
    with Watch() as watch:
        value = F.cross_entropy(x, CLASS)
    assert value.dtype == torch.float16
    assert watch.found[0].sum.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "folds", "picks"),
    ids=range(8),
    argvalues=[
        (lambda x: x.exp(), False, False),
        (lambda x: x.mean(0).exp(), True, False),
        (lambda x: x.sum(-2), True, False),
        (lambda x: x.amax(1), False, False),
        (lambda x: x.logsumexp(0), True, False),
        (lambda x: x.sum(-1) * 2, False, False),
        (lambda x: x[CLASS >= 0].exp(), False, True),
        (lambda x: x.masked_select(x > 0), False, True),
    ],
)
def test_what_stands_before_a_mean(make: Call, folds: bool, picks: bool) -> None:
    source: Any = make(SCORES.clone().requires_grad_() * 1).grad_fn
    assert (folds_rows(source), selects(source)) == (folds, picks)


@pytest.mark.parametrize(
    ("make", "compares"),
    [
        (lambda x, weight: x @ x.sin().T, True),
        (lambda x, weight: x @ (2 * x.detach()).T, True),
        (lambda x, weight: x @ weight.T, False),  # as many classes as rows
        (lambda x, weight: x @ x.sin().T[:, :4], False),
    ],
    ids=range(4),
)
def test_rows_compared_with_each_other(make: Any, compares: bool) -> None:
    x, weight = SCORES.clone().requires_grad_() * 1, OTHER.clone().requires_grad_()
    assert compares_rows(make(x, weight).sigmoid().sum(-1).grad_fn, ROWS) == compares


def test_nothing_stands_before_a_constant() -> None:
    assert not folds_rows(None)
    assert not selects(None)
    scale = torch.ones(3, requires_grad=True)
    assert not folds_rows((SCORES * scale.sum()).grad_fn)  # a parameter has no rows


def test_widened_keeps_the_graph() -> None:
    x = torch.ones((), requires_grad=True)
    assert widened(x).dtype == torch.float64
    assert widened(x).requires_grad
