"""Watching torch's losses: what is noted, what is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.losses.model.intercept import Watch, selects, widened
from anybatch.losses.reductions import FUNCTIONS
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
def test_what_stands_before_a_mean(make: Call, picks: bool) -> None:
    source: Any = make(SCORES.clone().requires_grad_() * 1).grad_fn
    assert selects(source) == picks


def test_nothing_stands_before_a_constant() -> None:
    assert not selects(None)


@pytest.mark.parametrize(
    ("total", "noted"),
    ids=range(6),
    argvalues=[
        (Tensor.sum, True),
        (torch.sum, True),
        (lambda x: x.sum((0, 1)), True),
        (lambda x: x.sum(0), False),
        (lambda x: (x > 0).sum(), False),
        (lambda x: x.detach().sum(), False),
    ],
)
def test_full_sums_are_noted_and_counts_are_not(total: Call, noted: bool) -> None:
    x = SCORES.clone().requires_grad_()
    with Watch() as watch:
        value = total(x)
    assert torch.equal(value, total(x))
    assert [(one.name, one.weight, one.is_sum) for one in watch.found] == [("sum", 1, True)] * noted


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


def test_widened_keeps_the_graph() -> None:
    x = torch.ones((), requires_grad=True)
    assert widened(x).dtype == torch.float64
    assert widened(x).requires_grad
