"""The tensors of the batch that a loss took its targets from, to count the whole batch at once."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.core import BatchError, Number, tree
from anybatch.losses.model.intercept import Origin

Transform = Callable[[Tensor, int], Tensor]

# Transformations of labels before the loss: none; next token with the last position padded or dropped;
# positions beyond the end clamped to the ignored one.
TRANSFORMS: Mapping[str, Transform] = {
    "as they are": lambda labels, ignored: labels,
    "next": lambda labels, ignored: F.pad(labels, (0, 1), value=ignored)[..., 1:],
    "shifted": lambda labels, ignored: labels[..., 1:],
    "clamped": lambda labels, ignored: labels.clamp(0, ignored),
}

_VIEWS = ("as they are", "shifted")  # transformations without a copy

# If labels equal another tensor in the first micro-batch (as the tokens of full rows), these names identify
# them. Checked at the end of the step.
_LABELS = re.compile("label|target|positions", re.IGNORECASE)


class Match(NamedTuple):
    """The path of a tensor in the batch, and the transformation that gave the targets."""

    leaf: str
    transform: str


def leaves_of(micro: Any) -> Mapping[str, Tensor]:
    """Return the tensors of a micro-batch by path; with other objects in it, the top-level tensors."""
    try:
        nest = tree.flatten(micro)
        return dict(zip(nest.paths, nest.leaves, strict=True))
    except BatchError:
        parts = cast("Any", micro).items() if isinstance(micro, Mapping) else enumerate(micro)
        return {str(place): part for place, part in parts if isinstance(part, Tensor)}


def rows_of(leaves: Iterable[Tensor]) -> int:
    """Return the number of rows; 0 if the tensors disagree."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else 0


def find(origin: Origin, leaves: Mapping[str, Tensor], *, padded: bool = False) -> list[Match]:
    """Return every tensor and transformation that give exactly the targets of a call.

    If all targets are ignored, `padded` separates next-token labels from unchanged ones.
    """
    target = origin.target
    if target is None or not origin.counts_classes:
        return []
    named = {place: leaf for place, leaf in leaves.items() if _LABELS.search(place)}
    others = {place: leaf for place, leaf in leaves.items() if place not in named}
    return _matching(origin, target, named, padded=padded) or _matching(origin, target, others, padded=padded)


def _matching(origin: Origin, target: Tensor, leaves: Mapping[str, Tensor], *, padded: bool) -> list[Match]:
    found: list[Match] = []
    for place, leaf in leaves.items():
        if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool or not leaf.dim():
            continue
        names = [name for name in TRANSFORMS if _may_be(name, origin, leaf)]
        names = [name for name in names if _is_same(_transformed(name, leaf, origin), target)]
        if len(names) > 1 and _share_memory(leaf, target):
            names = [name for name in names if name in _VIEWS] or names
        elif "next" in names and padded:
            names = ["next"]
        found += [Match(place, name) for name in names]
    return found


def count(origin: Origin, matches: Sequence[Match], leaves: Mapping[str, Tensor]) -> Number | None:
    """Return the weight of the whole batch; None without a match, or if matches give different weights."""
    targets = [_transformed(match.transform, leaves[match.leaf], origin) for match in matches]
    if len(targets) > 1:  # torch would refuse these values in a later micro-batch
        targets = [target for target in targets if _are_classes(target, origin)]
    weights = [origin.weigh(target) for target in targets]
    if len(weights) > 1 and len({float(weight) for weight in weights}) > 1:
        return None
    return weights[0] if weights else None


def _transformed(name: str, leaf: Tensor, origin: Origin) -> Tensor:
    return TRANSFORMS[name](leaf.long(), origin.ignored)  # torch takes uint8 too, which holds no -100


def _may_be(name: str, origin: Origin, leaf: Tensor) -> bool:
    if name == "clamped":
        return origin.ignored >= 0
    return name == "as they are" or leaf.dim() > 1  # in one axis, the next entry is another row


def _share_memory(leaf: Tensor, target: Tensor) -> bool:
    return leaf.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()


def _are_classes(target: Tensor, origin: Origin) -> bool:
    inside = (target >= 0) & (target < origin.classes)
    return bool((inside | (target == origin.ignored)).all())


def _is_same(labels: Tensor, target: Tensor) -> bool:
    if labels.numel() != target.numel():
        return False
    return torch.equal(labels.reshape(-1).to(target.device, torch.int64), target.reshape(-1).to(torch.int64))
