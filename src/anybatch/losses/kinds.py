"""What each loss of torch divides by: valid targets, elements, rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.total import Number

Settings = Mapping[str, Any]
Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How losses of one kind are summed and weighed.

    Attributes:
        counted: the weight depends on the targets' values, so it is counted; otherwise every row weighs the same.
        weigh: the weight, from the settings, the loss's arguments and its targets.
        terms: turns the unreduced losses into what is summed.
        arrange: puts the model's outputs and the targets into the order of the loss's arguments.
        per_row: names of settings that may hold one entry per row, and are cut along with the batch then.
        shape_tells: False where only the losses themselves tell how many they are (a distance of the user's own).
    """

    counted: bool = False
    shape_tells: bool = True
    weigh: Callable[[Settings, Arguments, Arguments], Number]
    terms: Callable[[Tensor, Arguments], Tensor] = lambda losses, arguments: losses
    arrange: Callable[[Arguments, Arguments], Arguments] = lambda outputs, targets: (*outputs, *targets)
    per_row: tuple[str, ...] = ()


def _count_classes(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    """Sum of class weights over valid targets; rows (times places) for targets that are probabilities."""
    target: Tensor = targets[0]
    if target.is_floating_point():
        return target.numel() // target.shape[1 if target.dim() > 1 else 0]
    ignored = settings.get("ignore_index")
    valid = target != (-100 if ignored is None else ignored)
    class_weight: Tensor | None = settings.get("weight")
    if class_weight is None:
        return valid.sum()
    return torch.where(valid, class_weight[torch.where(valid, target, 0)], 0).sum()


def _count_elements(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    return torch.broadcast_shapes(*[value.shape for value in arguments if isinstance(value, Tensor)]).numel()


def _sum_of_weights(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    """With a `weight` for each element, `mse_loss` and `l1_loss` divide by its sum."""
    return settings["weight"].sum()


def _kl_weight(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    by_rows = settings.get("reduction") == "batchmean"
    return arguments[0].shape[0] if by_rows else _count_elements(settings, arguments, targets)


def _rows(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    return arguments[0].shape[0]


def _places(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    """One loss for each vector along the last axis."""
    return arguments[0].numel() // arguments[0].shape[-1]


def _ctc_rows(settings: Settings, arguments: Arguments, targets: Arguments) -> Number:
    return targets[0].shape[0]


def _ctc_terms(losses: Tensor, arguments: Arguments) -> Tensor:
    """CTC's mean divides each row by its own target length first, then by the rows."""
    lengths = torch.as_tensor(arguments[3], device=losses.device)
    return losses / lengths.clamp(min=1)


def _mean_and_variance(outputs: Arguments, targets: Arguments) -> Arguments:
    """`gaussian_nll_loss(mean, target, var)`: a model that predicts both returns (mean, var)."""
    return (outputs[0], *targets, *outputs[1:])


_CLASSES = Kind(counted=True, weigh=_count_classes)
_ELEMENTS = Kind(weigh=_count_elements)
_PLACES = Kind(weigh=_places)
_WEIGHTED_ELEMENTS = Kind(counted=True, weigh=_sum_of_weights, per_row=("weight",))

KINDS: Mapping[Callable[..., Tensor], Kind] = {
    F.cross_entropy: _CLASSES,
    F.nll_loss: _CLASSES,
    F.binary_cross_entropy: Kind(weigh=_count_elements, per_row=("weight",)),
    F.binary_cross_entropy_with_logits: Kind(weigh=_count_elements, per_row=("weight", "pos_weight")),
    F.mse_loss: _ELEMENTS,
    F.l1_loss: _ELEMENTS,
    F.smooth_l1_loss: _ELEMENTS,
    F.huber_loss: Kind(weigh=_count_elements, per_row=("weight",)),
    F.soft_margin_loss: _ELEMENTS,
    F.hinge_embedding_loss: _ELEMENTS,
    F.margin_ranking_loss: _ELEMENTS,
    F.poisson_nll_loss: _ELEMENTS,
    F.gaussian_nll_loss: Kind(weigh=lambda settings, arguments, targets: arguments[0].numel(), arrange=_mean_and_variance),
    F.kl_div: Kind(weigh=_kl_weight),
    F.ctc_loss: Kind(weigh=_ctc_rows, terms=_ctc_terms),
    F.cosine_embedding_loss: _PLACES,
    F.triplet_margin_loss: _PLACES,
    F.triplet_margin_with_distance_loss: Kind(weigh=_rows, shape_tells=False),
    F.multi_margin_loss: _PLACES,
    F.multilabel_margin_loss: _PLACES,
    F.multilabel_soft_margin_loss: _PLACES,
}

# The kind of a loss that was given a weight for every element.
WEIGHTED_KINDS: Mapping[Callable[..., Tensor], Kind] = {F.mse_loss: _WEIGHTED_ELEMENTS, F.l1_loss: _WEIGHTED_ELEMENTS}

MODULES: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.MarginRankingLoss: F.margin_ranking_loss,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.GaussianNLLLoss: F.gaussian_nll_loss,
    nn.KLDivLoss: F.kl_div,
    nn.CTCLoss: F.ctc_loss,
    nn.CosineEmbeddingLoss: F.cosine_embedding_loss,
    nn.TripletMarginLoss: F.triplet_margin_loss,
    nn.TripletMarginWithDistanceLoss: F.triplet_margin_with_distance_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
}

# Newer than the oldest torch we support: a linear layer and cross-entropy in one, without holding all logits.
if hasattr(F, "linear_cross_entropy"):
    KINDS = {**KINDS, F.linear_cross_entropy: _CLASSES}
    MODULES = {**MODULES, nn.LinearCrossEntropyLoss: F.linear_cross_entropy}
