"""The divisor of each torch loss: valid targets, elements or rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES, Number

Settings = Mapping[str, Any]
Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The summation and weighing of one kind of loss."""

    # the weight under `reduction="mean"`, from the settings, the loss's arguments and its targets
    weigh: Callable[[Settings, Arguments, Arguments], Number]
    # True: the weight depends on values and is counted on the whole batch; False: it is the number of losses,
    # the same for every row
    counted: bool = False
    shape_tells: bool = True  # False if `weigh` does not know the number of losses (a custom distance)
    # converts the unreduced losses to the summands
    terms: Callable[[Tensor, Arguments], Tensor] = lambda losses, arguments: losses
    # puts the model's outputs and the targets into the order of the loss's arguments
    arrange: Callable[[Arguments, Arguments], Arguments] = lambda outputs, targets: (*outputs, *targets)
    arguments: int = 2  # number of compared tensors
    has_target: bool = True  # False if all of them are outputs of the model
    per_row: tuple[str, ...] = ()  # settings that may have one entry per row, and are refused then
    reductions: tuple[str, ...] = ("mean", "sum")  # supported reductions
    broadcasts: bool = False  # True if output and target have the same axes, and torch broadcasts size 1
    axes: int = 0  # least number of axes of the output; with fewer, torch takes all rows for one

    def keeps_rows_apart(self, arguments: Arguments) -> bool:
        """Return True if row i is compared with row i only: torch broadcasts from the last axis."""
        is_compared = self.broadcasts or (self.arguments == 3 and not self.counted)
        if not is_compared and isinstance(arguments[0], Tensor):  # the usual case
            return arguments[0].dim() >= self.axes
        first, *others = [one for one in arguments if isinstance(one, Tensor)] or [torch.ones(1, 1, 1)]
        if first.dim() < self.axes:
            return False
        if self.broadcasts and others and first.dim() != others[0].dim():
            # A model that squeezes has dropped the axis of a single row; one of size 1 may be another axis.
            return 1 not in first.shape and (1, *first.shape) == others[0].shape
        return not is_compared or all(one.shape[:1] == first.shape[:1] for one in others)


def _count_classes(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    """Return the sum of class weights over valid targets; rows (times positions) for probabilities."""
    target = targets[0]
    if target.is_floating_point():
        return target.numel() // target.shape[1 if target.dim() > 1 else 0]
    ignored = settings.get("ignore_index")
    valid = target != (-100 if ignored is None else ignored)
    class_weight = settings.get("weight")
    if class_weight is None:
        return valid.sum()
    # int64, because torch accepts uint8 targets too, and an index of uint8 is a mask.
    return summed(torch.where(valid, class_weight[torch.where(valid, target, 0).long()], 0))


def summed(values: Tensor) -> Tensor:
    """Return the sum, at least in float32."""
    return values.sum(dtype=torch.float32 if values.dtype in SHORT_DTYPES else None)


def _count_elements(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    first, *others = arguments
    if all(value.shape == first.shape for value in others):  # the usual case, and 20 us faster
        return first.numel()
    return torch.broadcast_shapes(*[value.shape for value in arguments]).numel()


def _count_vectors(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    first = arguments[0]  # one loss for each vector along the last axis
    vectors = [value.shape[:-1] for value in arguments if value.dim() == first.dim()]
    return torch.broadcast_shapes(*vectors).numel()


def _axis(axis: int) -> Callable[[Settings, Arguments, Arguments], Number]:
    """Return a function that returns the size of the first argument's axis."""
    return lambda settings, arguments, targets: arguments[0].shape[axis]


def _per_target_length(losses: Tensor, arguments: Arguments) -> Tensor:
    """Divide the losses of CTC by the target lengths, as its mean does before it divides by rows."""
    lengths = torch.as_tensor(arguments[3], device=losses.device)
    return losses / lengths.clamp(min=1)


CLASSES = Kind(counted=True, weigh=_count_classes, axes=2)
ELEMENTS = Kind(weigh=_count_elements, per_row=("weight",), broadcasts=True)
WEIGHTED_ELEMENTS = Kind(  # as `mse_loss` and `l1_loss` divide with a weight for every element
    counted=True,
    weigh=lambda settings, arguments, targets: summed(settings["weight"]),
    per_row=("weight",),
    broadcasts=True,
)
DIVERGENCES = Kind(weigh=_count_elements, reductions=("mean", "sum", "batchmean"), broadcasts=True)
BINARY = Kind(weigh=_count_elements, per_row=("weight", "pos_weight"), broadcasts=True)
GAUSSIANS = Kind(
    # A variance that all elements of a row share may lack the last axis.
    weigh=lambda settings, arguments, targets: _count_elements(settings, arguments[:2], targets),
    arrange=lambda outputs, targets: (outputs[0], *targets, *outputs[1:]),  # a model may return (mean, var)
    arguments=3,
    per_row=("var",),
    broadcasts=True,
)
PAIRS = Kind(weigh=_count_elements, arguments=3)
VECTORS = Kind(weigh=_count_vectors, axes=2)
LABELS = Kind(weigh=_count_vectors, per_row=("weight",), broadcasts=True, axes=2)
PAIRS_OF_VECTORS = Kind(weigh=_count_vectors, arguments=3, axes=2)
TRIPLETS = Kind(weigh=_count_vectors, arguments=3, has_target=False, axes=2)
DISTANCES = Kind(weigh=_axis(0), shape_tells=False, arguments=3, has_target=False)
SEQUENCES = Kind(weigh=_axis(1), terms=_per_target_length, arguments=4, axes=3)  # (time, rows, classes)

_LOSSES: tuple[tuple[Callable[..., Tensor], type[nn.Module], Kind], ...] = (
    (F.cross_entropy, nn.CrossEntropyLoss, CLASSES),
    (F.nll_loss, nn.NLLLoss, CLASSES),
    (F.binary_cross_entropy, nn.BCELoss, BINARY),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, BINARY),
    (F.mse_loss, nn.MSELoss, ELEMENTS),
    (F.l1_loss, nn.L1Loss, ELEMENTS),
    (F.smooth_l1_loss, nn.SmoothL1Loss, ELEMENTS),
    (F.huber_loss, nn.HuberLoss, ELEMENTS),
    (F.soft_margin_loss, nn.SoftMarginLoss, ELEMENTS),
    (F.hinge_embedding_loss, nn.HingeEmbeddingLoss, ELEMENTS),
    (F.margin_ranking_loss, nn.MarginRankingLoss, PAIRS),
    (F.poisson_nll_loss, nn.PoissonNLLLoss, ELEMENTS),
    (F.gaussian_nll_loss, nn.GaussianNLLLoss, GAUSSIANS),
    (F.kl_div, nn.KLDivLoss, DIVERGENCES),
    (F.ctc_loss, nn.CTCLoss, SEQUENCES),
    (F.cosine_embedding_loss, nn.CosineEmbeddingLoss, PAIRS_OF_VECTORS),
    (F.triplet_margin_loss, nn.TripletMarginLoss, TRIPLETS),
    (F.triplet_margin_with_distance_loss, nn.TripletMarginWithDistanceLoss, DISTANCES),
    (F.multi_margin_loss, nn.MultiMarginLoss, VECTORS),
    (F.multilabel_margin_loss, nn.MultiLabelMarginLoss, VECTORS),
    (F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, LABELS),
)
FUNCTIONS: dict[Callable[..., Tensor], Kind] = {function: kind for function, _, kind in _LOSSES}
MODULES: dict[type[nn.Module], Kind] = {module: kind for _, module, kind in _LOSSES}

# torch 2.13: a linear layer and cross-entropy in one, without holding all logits. The module holds the weight
# of the layer; for the function the model returns it with its output.
if hasattr(F, "linear_cross_entropy"):
    FUNCTIONS[F.linear_cross_entropy] = replace(CLASSES, arguments=3)
    MODULES[nn.LinearCrossEntropyLoss] = CLASSES

# The kind of a function with a weight for every element.
WEIGHTED_FUNCTIONS: Mapping[Callable[..., Tensor], Kind] = {
    F.mse_loss: WEIGHTED_ELEMENTS,
    F.l1_loss: WEIGHTED_ELEMENTS,
}

WEIGHTS = ("weight", "pos_weight")  # weights of classes or elements
DEPRECATED = ("size_average", "reduce")


def deprecated_in(settings: Settings) -> list[str]:
    """Return the deprecated forms of `reduction` that are set."""
    return [name for name in DEPRECATED if settings.get(name) is not None]


def trained_in(settings: Settings) -> list[str]:
    """Return the names of weights that require grad."""
    return [name for name in WEIGHTS if getattr(settings.get(name), "requires_grad", False)]
