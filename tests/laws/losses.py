"""Every loss of torch whose whole-batch value is a ratio of sums, in every combination of its options."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.testing import ConvNet, Perceptron, Transformer
from tests.laws.cases import Case, Made, cases_of
from tests.laws.draw import CLASSES, FEATURES, Draw

REDUCTIONS = ("mean", "sum")
IMAGE = (3, 2)
LENGTH = 4


# ---- what is trained


class Twins(nn.Module):
    """One network for several inputs, as ranking and triplet losses need it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = Perceptron(FEATURES, outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net(x).squeeze(-1) for x in inputs)


class Gaussian(nn.Module):
    """Mean and variance of each output."""

    def __init__(self, means: int, variances: int) -> None:
        super().__init__()
        self.mean, self.spread = Perceptron(FEATURES, means), Perceptron(FEATURES, variances)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.spread(x).exp()


class TimeFirst(nn.Module):
    """(rows, time, features) to log-probabilities (time, rows, classes), as CTC reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).log_softmax(-1).transpose(0, 1)


class WithHead(nn.Module):
    """Hidden states and the weight of the layer that makes scores of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Perceptron(FEATURES, 4), nn.Linear(4, CLASSES, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.head.weight


def perceptron(outputs: int, *then: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Perceptron(FEATURES, outputs), *then)


def conv_net(*then: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(ConvNet(1, CLASSES), *then)


# ---- what it is trained on


def indices(draw: Draw) -> Any:
    return draw.normal(FEATURES), draw.classes()


def dense_indices(draw: Draw) -> Any:
    return draw.normal(1, *IMAGE), draw.classes(*IMAGE)


def tokens(draw: Draw) -> Any:
    """Rows of different lengths, padded with 0 in inputs and labels alike."""
    padding = torch.arange(LENGTH) >= draw.integers(1, LENGTH + 1, 1)
    inputs, labels = draw.integers(1, CLASSES, LENGTH), draw.integers(1, CLASSES, LENGTH)
    labels = labels.where(draw.valid(LENGTH), 0)
    return {"tokens": inputs.masked_fill(padding, 0), "labels": labels.masked_fill(padding, 0)}


def probabilities(draw: Draw) -> Any:
    return draw.normal(FEATURES), draw.probabilities(CLASSES)


def dense_probabilities(draw: Draw) -> Any:
    return draw.normal(1, *IMAGE), draw.probabilities(CLASSES, *IMAGE)


def like_outputs(target: Callable[[Draw, int], Tensor], outputs: int = CLASSES) -> Callable[[Draw], Any]:
    return lambda draw: (draw.normal(FEATURES), target(draw, outputs))


def log_probabilities(draw: Draw) -> Any:
    target = draw.probabilities(CLASSES)
    return draw.normal(FEATURES), target.log() if draw.options.get("log_target") else target


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


def labels(draw: Draw) -> Any:
    """Indices of some classes, then -1."""
    order = draw.uniform(CLASSES).argsort(1)
    return draw.normal(FEATURES), order.masked_fill(
        torch.arange(CLASSES) >= draw.integers(0, CLASSES + 1, 1), -1
    )


# ---- options


def per_class(draw: Draw) -> Tensor:
    return draw.per_class()


def for_each(draw: Draw) -> Tensor:
    return draw.uniform(CLASSES)


def for_row(draw: Draw) -> Tensor:
    return draw.uniform(1)


def manhattan(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().sum(-1)


CLASS_WEIGHT = (None, Made(per_class))
ANY_WEIGHT = (None, Made(per_class), Made(for_row, per_row=True), Made(for_each, per_row=True))
SMOOTHING = (None, 0.1)


def classifications() -> list[Case]:
    log_softmax = nn.LogSoftmax(1)
    choices = {"weight": CLASS_WEIGHT, "reduction": REDUCTIONS}
    indexed = {**choices, "ignore_index": (None, 2)}
    cross = {"function": F.cross_entropy, "module": nn.CrossEntropyLoss, "label_smoothing": SMOOTHING}
    likely = {"function": F.nll_loss, "module": nn.NLLLoss}
    return [
        *cases_of("cross_entropy", perceptron(CLASSES), indices, **cross, **indexed),
        *cases_of("cross_entropy-dense", conv_net(), dense_indices, **cross, **indexed),
        *cases_of("cross_entropy-soft", perceptron(CLASSES), probabilities, **cross, **choices),
        *cases_of("cross_entropy-soft-dense", conv_net(), dense_probabilities, **cross, **choices),
        *cases_of(
            "cross_entropy-tokens",
            lambda: Transformer(CLASSES),
            tokens,
            ignore_index=(0,),
            **cross,
            **choices,
        ),
        *cases_of("nll", perceptron(CLASSES, log_softmax), indices, **likely, **indexed),
        *cases_of("nll-dense", conv_net(log_softmax), dense_indices, **likely, **indexed),
    ]


def linear_classifications() -> list[Case]:
    """New in torch 2.12: the scores' layer belongs to the loss, or comes from the model."""
    if not hasattr(F, "linear_cross_entropy"):
        return []
    sizes = {"in_features": (4,), "num_classes": (CLASSES,), "bias": (False, True)}
    choices = {"weight": CLASS_WEIGHT, "reduction": REDUCTIONS, "label_smoothing": SMOOTHING}
    indexed = {**choices, "ignore_index": (None, 2)}
    pieces = {**choices, "label_smoothing": (None,), "options": (nn.LinearCrossEntropyOptions(),)}
    own, given = {"module": nn.LinearCrossEntropyLoss}, {"function": F.linear_cross_entropy}
    return [
        *cases_of("linear", perceptron(4), indices, **own, **sizes, **indexed),
        *cases_of("linear-soft", perceptron(4), probabilities, **own, **sizes, **choices),
        *cases_of("linear-pieces", perceptron(4), indices, **own, **sizes, **pieces),
        *cases_of("linear-given", WithHead, indices, **given, **indexed),
    ]


def binary() -> list[Case]:
    model, batch = perceptron(CLASSES), like_outputs(Draw.uniform)
    weights = {"weight": ANY_WEIGHT, "reduction": REDUCTIONS}
    logits = {"function": F.binary_cross_entropy_with_logits, "module": nn.BCEWithLogitsLoss}
    chances = {"function": F.binary_cross_entropy, "module": nn.BCELoss}
    return [
        *cases_of("bce", perceptron(CLASSES, nn.Sigmoid()), batch, **chances, **weights),
        *cases_of("bce_logits", model, batch, pos_weight=ANY_WEIGHT, **logits, **weights),
    ]


def regressions() -> list[Case]:
    model, batch = perceptron(CLASSES), like_outputs(Draw.normal)
    reduction = {"reduction": REDUCTIONS}
    each = {"weight": (Made(for_each, per_row=True),), **reduction}
    counted = like_outputs(Draw.counts)
    poisson = {"log_input": (None, False), "full": (None, True), **reduction}
    gauss = {"function": F.gaussian_nll_loss, "module": nn.GaussianNLLLoss, "full": (None, True), **reduction}
    return [
        *cases_of("mse", model, batch, function=F.mse_loss, module=nn.MSELoss, **reduction),
        *cases_of("mse", model, batch, function=F.mse_loss, **each),
        *cases_of("l1", model, batch, function=F.l1_loss, module=nn.L1Loss, **reduction),
        *cases_of("l1", model, batch, function=F.l1_loss, **each),
        *cases_of(
            "smooth_l1",
            model,
            batch,
            function=F.smooth_l1_loss,
            module=nn.SmoothL1Loss,
            beta=(None, 0.3),
            **reduction,
        ),
        *cases_of(
            "huber", model, batch, function=F.huber_loss, module=nn.HuberLoss, delta=(None, 0.3), **reduction
        ),
        *cases_of("huber", model, batch, function=F.huber_loss, **each),
        *cases_of(
            "poisson",
            perceptron(CLASSES, nn.Softplus()),
            counted,
            function=F.poisson_nll_loss,
            module=nn.PoissonNLLLoss,
            **poisson,
        ),
        *cases_of("gaussian", lambda: Gaussian(CLASSES, CLASSES), batch, **gauss),
        *cases_of("gaussian-one-variance", lambda: Gaussian(CLASSES, 1), batch, **gauss),
        *cases_of("gaussian-many-targets", lambda: Gaussian(1, 1), batch, **gauss),
    ]


def divergences() -> list[Case]:
    reductions = (*REDUCTIONS, "batchmean")
    kl = {"function": F.kl_div, "module": nn.KLDivLoss, "reduction": reductions, "log_target": (None, True)}
    ctc = {"function": F.ctc_loss, "module": nn.CTCLoss, "reduction": REDUCTIONS}
    return [
        *cases_of("kl_div", perceptron(CLASSES, nn.LogSoftmax(1)), log_probabilities, **kl),
        *cases_of("ctc", TimeFirst, sequences, zero_infinity=(None, True), blank=(None, 2), **ctc),
    ]


def margins() -> list[Case]:
    model, reduction = perceptron(CLASSES), {"reduction": REDUCTIONS}
    margin = {"margin": (None, 0.5), **reduction}
    signs, zero_one = like_outputs(Draw.signs), like_outputs(lambda draw, size: draw.uniform(size).round())
    multi = {"p": (None, 2), "weight": CLASS_WEIGHT, **margin}
    many = {"weight": ANY_WEIGHT, **reduction}
    ranks = {"function": F.margin_ranking_loss, "module": nn.MarginRankingLoss, **margin}
    cosines = {"function": F.cosine_embedding_loss, "module": nn.CosineEmbeddingLoss, **margin}
    hinges = {"function": F.hinge_embedding_loss, "module": nn.HingeEmbeddingLoss, **margin}
    return [
        *cases_of(
            "soft_margin", model, signs, function=F.soft_margin_loss, module=nn.SoftMarginLoss, **reduction
        ),
        *cases_of("hinge", model, signs, **hinges),
        *cases_of("margin_ranking", lambda: Twins(1), pairs, **ranks),
        *cases_of("cosine", lambda: Twins(4), pairs, **cosines),
        *cases_of(
            "multi_margin",
            model,
            lambda draw: (draw.normal(FEATURES), draw.integers(0, CLASSES)),
            function=F.multi_margin_loss,
            module=nn.MultiMarginLoss,
            **multi,
        ),
        *cases_of(
            "multilabel_margin",
            model,
            labels,
            function=F.multilabel_margin_loss,
            module=nn.MultiLabelMarginLoss,
            **reduction,
        ),
        *cases_of(
            "multilabel_soft_margin",
            model,
            zero_one,
            function=F.multilabel_soft_margin_loss,
            module=nn.MultiLabelSoftMarginLoss,
            **many,
        ),
    ]


def distances() -> list[Case]:
    near = {"margin": (None, 0.5), "swap": (None, True), "reduction": REDUCTIONS}
    own = {"distance_function": (None, manhattan), **near}
    plain = {"function": F.triplet_margin_loss, "module": nn.TripletMarginLoss}
    free = {"function": F.triplet_margin_with_distance_loss, "module": nn.TripletMarginWithDistanceLoss}
    return [
        *cases_of("triplet", lambda: Twins(4), triplets, p=(None, 1), **plain, **near),
        *cases_of("triplet-many", lambda: Twins(4), many_negatives, **plain, **near),
        *cases_of("triplet_distance", lambda: Twins(4), triplets, **free, **own),
        *cases_of("triplet_distance-many", lambda: Twins(4), many_negatives, **free, **own),
    ]


CASES = [
    *classifications(),
    *linear_classifications(),
    *binary(),
    *regressions(),
    *divergences(),
    *margins(),
    *distances(),
]
