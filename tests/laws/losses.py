"""Every loss of torch whose whole-batch value is a ratio of sums, in every combination of its options."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import zoo
from tests.laws.cases import REDUCTIONS, Case, Made, cases_of
from tests.laws.draw import CLASSES, FEATURES, Draw
from tests.zoo import Perceptron, Transformer

IMAGE = (3, 2)
LENGTH = 4


def twins(outputs: int) -> Callable[[], nn.Module]:
    return lambda: zoo.twins(outputs, features=FEATURES)


def gaussian(means: int, variances: int) -> Callable[[], nn.Module]:
    return lambda: zoo.gaussian(means, variances, features=FEATURES)


def time_first() -> nn.Module:
    """Return (rows, time, features) to log-probabilities (time, rows, classes), as CTC reads them."""
    net = Perceptron(FEATURES, CLASSES)
    return zoo.Made(lambda self, x: self.net(x).log_softmax(-1).transpose(0, 1), net=net)


def with_head() -> nn.Module:
    """Return a model of hidden states and the weight of the layer that makes scores of them."""
    head = nn.Linear(4, CLASSES, bias=False)
    return zoo.Made(lambda self, x: (self.net(x), self.head.weight), net=Perceptron(FEATURES, 4), head=head)


def perceptron(outputs: int, *then: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Perceptron(FEATURES, outputs), *then)


def conv_net(*then: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(zoo.conv_net(1, CLASSES), *then)


def rows_and(target: Callable[[Draw], Any], *shape: int) -> Callable[[Draw], Any]:
    return lambda draw: (draw.normal(*(shape or (FEATURES,))), target(draw))


INDICES = rows_and(lambda draw: draw.classes())
PIXELS = rows_and(lambda draw: draw.classes(*IMAGE), 1, *IMAGE)
SHARES = rows_and(lambda draw: draw.probabilities(CLASSES))
PIXEL_SHARES = rows_and(lambda draw: draw.probabilities(CLASSES, *IMAGE), 1, *IMAGE)
NUMBERS = rows_and(lambda draw: draw.normal(CLASSES))
CHANCES = rows_and(lambda draw: draw.uniform(CLASSES))
COUNTS = rows_and(lambda draw: draw.counts(CLASSES))
SIGNS = rows_and(lambda draw: draw.signs(CLASSES))
ZERO_OR_ONE = rows_and(lambda draw: draw.uniform(CLASSES).round())
ONE_CLASS = rows_and(lambda draw: draw.integers(0, CLASSES))


def tokens(draw: Draw) -> Any:
    """Rows of different lengths, padded with 0 in inputs and labels alike."""
    padding = torch.arange(LENGTH) >= draw.integers(1, LENGTH + 1, 1)
    inputs, labels = draw.integers(1, CLASSES, LENGTH), draw.integers(1, CLASSES, LENGTH)
    labels = labels.where(draw.valid(LENGTH), 0)
    return {"tokens": inputs.masked_fill(padding, 0), "labels": labels.masked_fill(padding, 0)}


@rows_and
def log_probabilities(draw: Draw) -> Tensor:
    target = draw.probabilities(CLASSES)
    return target.log() if draw.options.get("log_target") else target


def sequences(draw: Draw) -> Any:
    """Time steps 2 to 6, targets 0 to 3 long; some do not fit where an infinite loss counts as none."""
    longest = 6 if draw.options.get("zero_infinity") else 3
    blank = draw.options.get("blank", 0)
    targets = draw.integers(1, CLASSES, longest)
    targets = targets.where(targets != blank, 0)
    input_lengths = draw.integers(2, 7) if draw.options.get("zero_infinity") else draw.integers(6, 7)
    return draw.normal(6, FEATURES), (targets, input_lengths, draw.integers(0, longest + 1))


def pairs(draw: Draw) -> Any:
    return draw.normal(FEATURES), draw.normal(FEATURES), draw.signs()


def triplets(draw: Draw) -> Any:
    return draw.normal(FEATURES), draw.normal(FEATURES), draw.normal(FEATURES)


def many_negatives(draw: Draw) -> Any:
    """Three negatives for each anchor: distances broadcast."""
    return draw.normal(1, FEATURES), draw.normal(1, FEATURES), draw.normal(3, FEATURES)


@rows_and
def labels(draw: Draw) -> Tensor:
    """Indices of some classes, then -1."""
    order = draw.uniform(CLASSES).argsort(1)
    return order.masked_fill(torch.arange(CLASSES) >= draw.integers(0, CLASSES + 1, 1), -1)


def manhattan(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().sum(-1)


CLASS_WEIGHT = {"weight": (None, Made(Draw.per_class))}
ANY_WEIGHT = (None, Made(Draw.per_class))
IGNORED = {"ignore_index": (None, 2)}
SMOOTH = {"label_smoothing": (None, 0.1), **CLASS_WEIGHT}
MARGIN, FULL = {"margin": (None, 0.5)}, {"full": (None, True)}
NEAR = {**MARGIN, "swap": (None, True)}


def classifications() -> Iterator[Case]:
    log_softmax, score = nn.LogSoftmax(1), perceptron(CLASSES)
    cross, likely = (nn.CrossEntropyLoss, F.cross_entropy), (nn.NLLLoss, F.nll_loss)
    yield from cases_of("cross_entropy", cross, score, INDICES, **SMOOTH, **IGNORED)
    yield from cases_of("cross_entropy-dense", cross, conv_net(), PIXELS, **SMOOTH, **IGNORED)
    yield from cases_of("cross_entropy-soft", cross, score, SHARES, **SMOOTH)
    yield from cases_of("cross_entropy-soft-dense", cross, conv_net(), PIXEL_SHARES, **SMOOTH)
    yield from cases_of(
        "cross_entropy-tokens", cross, lambda: Transformer(CLASSES), tokens, ignore_index=(0,), **SMOOTH
    )
    yield from cases_of("nll", likely, perceptron(CLASSES, log_softmax), INDICES, **CLASS_WEIGHT, **IGNORED)
    yield from cases_of("nll-dense", likely, conv_net(log_softmax), PIXELS, **CLASS_WEIGHT, **IGNORED)


def linear_classifications() -> Iterator[Case]:
    """New in torch 2.12: the scores' layer belongs to the loss, or comes from the model."""
    if not hasattr(F, "linear_cross_entropy"):
        return
    own, hidden = (nn.LinearCrossEntropyLoss,), perceptron(4)
    sizes = {"in_features": (4,), "num_classes": (CLASSES,), "bias": (False, True)}
    pieces = {**CLASS_WEIGHT, "options": (nn.LinearCrossEntropyOptions(),)}
    yield from cases_of("linear", own, hidden, INDICES, **sizes, **SMOOTH, **IGNORED)
    yield from cases_of("linear-soft", own, hidden, SHARES, **sizes, **SMOOTH)
    yield from cases_of("linear-pieces", own, hidden, INDICES, **sizes, **pieces)
    yield from cases_of("linear-given", (F.linear_cross_entropy,), with_head, INDICES, **SMOOTH, **IGNORED)


def regressions() -> Iterator[Case]:
    score, chance = perceptron(CLASSES), perceptron(CLASSES, nn.Sigmoid())
    bce = nn.BCELoss, F.binary_cross_entropy
    logits = nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits
    poisson, gauss = (nn.PoissonNLLLoss, F.poisson_nll_loss), (nn.GaussianNLLLoss, F.gaussian_nll_loss)
    rate, log_input = perceptron(CLASSES, nn.Softplus()), {"log_input": (None, False)}
    yield from cases_of("bce", bce, chance, CHANCES, weight=ANY_WEIGHT)
    yield from cases_of("bce_logits", logits, score, CHANCES, pos_weight=ANY_WEIGHT, weight=ANY_WEIGHT)
    yield from cases_of("mse", (nn.MSELoss, F.mse_loss), score, NUMBERS)
    yield from cases_of("l1", (nn.L1Loss, F.l1_loss), score, NUMBERS)
    yield from cases_of("smooth_l1", (nn.SmoothL1Loss, F.smooth_l1_loss), score, NUMBERS, beta=(None, 0.3))
    yield from cases_of("huber", (nn.HuberLoss, F.huber_loss), score, NUMBERS, delta=(None, 0.3))
    yield from cases_of("poisson", poisson, rate, COUNTS, **log_input, **FULL)
    yield from cases_of("gaussian", gauss, gaussian(CLASSES, CLASSES), NUMBERS, **FULL)
    yield from cases_of("gaussian-one-variance", gauss, gaussian(CLASSES, 1), NUMBERS, **FULL)
    yield from cases_of("gaussian-many-targets", gauss, gaussian(1, 1), NUMBERS, **FULL)


def divergences() -> Iterator[Case]:
    kl, ctc = (nn.KLDivLoss, F.kl_div), (nn.CTCLoss, F.ctc_loss)
    reductions, log_target = (*REDUCTIONS, "batchmean"), {"log_target": (None, True)}
    likely, infinite = perceptron(CLASSES, nn.LogSoftmax(1)), {"zero_infinity": (None, True)}
    yield from cases_of("kl_div", kl, likely, log_probabilities, reductions=reductions, **log_target)
    yield from cases_of("ctc", ctc, time_first, sequences, **infinite, blank=(None, 2))


def margins() -> Iterator[Case]:
    score = perceptron(CLASSES)
    ranking = nn.MarginRankingLoss, F.margin_ranking_loss
    cosine = nn.CosineEmbeddingLoss, F.cosine_embedding_loss
    hinge, soft = (nn.HingeEmbeddingLoss, F.hinge_embedding_loss), (nn.SoftMarginLoss, F.soft_margin_loss)
    multi = nn.MultiMarginLoss, F.multi_margin_loss
    many = nn.MultiLabelMarginLoss, F.multilabel_margin_loss
    many_soft = nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss
    yield from cases_of("soft_margin", soft, score, SIGNS)
    yield from cases_of("hinge", hinge, score, SIGNS, **MARGIN)
    yield from cases_of("margin_ranking", ranking, twins(1), pairs, **MARGIN)
    yield from cases_of("cosine", cosine, twins(4), pairs, **MARGIN)
    yield from cases_of("multi_margin", multi, score, ONE_CLASS, p=(None, 2), **CLASS_WEIGHT, **MARGIN)
    yield from cases_of("multilabel_margin", many, score, labels)
    yield from cases_of("multilabel_soft_margin", many_soft, score, ZERO_OR_ONE, weight=ANY_WEIGHT)


def distances() -> Iterator[Case]:
    plain, net = (nn.TripletMarginLoss, F.triplet_margin_loss), twins(4)
    free = nn.TripletMarginWithDistanceLoss, F.triplet_margin_with_distance_loss
    own = {"distance_function": (None, manhattan)}
    yield from cases_of("triplet", plain, net, triplets, p=(None, 1), **NEAR)
    yield from cases_of("triplet-many", plain, net, many_negatives, **NEAR)
    yield from cases_of("triplet_distance", free, net, triplets, **own, **NEAR)
    yield from cases_of("triplet_distance-many", free, net, many_negatives, **own, **NEAR)


KINDS = classifications, linear_classifications, regressions, divergences, margins, distances
CASES = [case for kind in KINDS for case in kind()]
