"""Denominators: counts of a batch that may divide a term, and the one that makes all splits agree"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.check.outputs import Evaluation
from anybatch.core import tree
from anybatch.losses import TARGET_KEYS
from anybatch.state import Reachable

FILLS = (-100, 0, -1)  # common fill values of targets: torch's and Hugging Face's, zero, scikit-learn's
Cuts = Sequence[Sequence[Evaluation]]  # the micro-batches of each split

_EXACT = 1e-13  # error of float64 on few terms
_EPSILON = 1e-4  # the share of an error that an epsilon in a denominator may leave


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A possible denominator."""

    words: str
    code: str  # Python code that counts it in `micro`
    weight: Tensor | None = None  # class weights, under the name `weight` in `counted`
    counted: str = ""  # the code to evaluate; `code` if empty

    def count(self, micro: Any) -> float:
        """Evaluate the code on a micro-batch."""
        names = {"micro": micro, "torch": torch, "weight": self.weight}
        return float(eval(self.counted or self.code, names))  # the code is made below


def candidates(batch: Any, weights: Mapping[str, Tensor]) -> list[Candidate]:
    """Return what a loss of this batch may have to be divided by, the plainest first."""
    nest = tree.flatten(batch)
    names = ["micro" + path if path != "the batch itself" else "micro" for path in nest.paths]
    found = [Candidate("the rows", f"len({names[0]})")]
    found += [Candidate(f"the elements of {name}", f"{name}.numel()") for name in names]
    # Targets are counted most often: by their name, or because they come last.
    order = sorted(range(len(names)), key=lambda index: (not _is_target(nest.paths[index]), -index))
    for index in order:
        name, leaf = names[index], nest.leaves[index]
        found += _counts(leaf, name, name)
        if leaf.dim() > 1 and leaf.shape[1] > 1:
            words, code = f"{name} (shifted by one)", f"{name}[:, 1:]"
            found += [*_counts(leaf, words, code), Candidate(f"the elements of {words}", f"{code}.numel()")]
    for index in order:
        name, leaf = names[index], nest.leaves[index]
        valid = name if not _is_class(leaf) or int(leaf.min()) >= 0 else f"{name}[{name} >= 0]"
        for key, weight in weights.items() if _is_class(leaf) else ():
            words, code = f"the sum of the class weights {key}[{name}]", f"{key}[{valid}].sum()"
            found.append(Candidate(words, code, weight.detach().double(), f"weight[{valid}].sum()"))
    return found


def _counts(leaf: Tensor, words: str, code: str) -> Iterator[Candidate]:
    if _is_class(leaf):
        for fill in dict.fromkeys((*FILLS, *[int(value) for value in leaf.reshape(-1)[-1:]])):
            yield Candidate(f"the entries of {words} that are not {fill}", f"({code} != {fill}).sum()")
    if not leaf.is_complex() and bool((leaf >= 0).all()):
        yield Candidate(f"the sum of {words}", f"{code}.sum()")


def _is_target(path: str) -> bool:
    return any(path in (f"[{key!r}]", f".{key}") for key in TARGET_KEYS)


def _is_class(leaf: Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def held_weights(*holders: Any) -> dict[str, Tensor]:
    """Return real tensors of one axis that functions, modules and objects hold, by name: class weights."""
    found = Reachable(holders)
    tables = [
        *[scope for scope, _ in found.scopes],
        *[one for one in found.containers if isinstance(one, dict)],
    ]
    names = {id(value): key for table in tables for key, value in table.items() if isinstance(key, str)}
    tensors = [one for one in found.values if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
    weights = [one for one in tensors if one.dim() == 1 and one.is_floating_point()]
    return {names.get(id(one), "weight"): one for one in reversed(weights)}


def fit(
    options: Sequence[Candidate],
    name: str,
    whole: Evaluation,
    parted: Cuts,
    *,
    tolerance: float,
    error: float,
) -> tuple[Candidate, bool] | None:
    """Return the candidate that makes all splits agree, and True if an epsilon is left.

    `tolerance` is the relative error that counts as rounding, `error` that with the term's own weights.
    """
    found = [
        (max((_misfit(one, name, whole, parts) for parts in parted), default=math.inf), one)
        for one in options
    ]
    best = min((value for value, _ in found), default=math.inf)
    # Means of single terms lose less than gradients.
    if best > max(tolerance / 10, _EPSILON * min(error, 1.0)):
        return None
    # Take the first that fits as well as the best: in float32, and early in training when all tokens have
    # about the same loss, wrong ones come close.
    first = next(one for value, one in found if value <= max(10 * best, _EXACT))
    return first, best > tolerance / 10


def misfit(weights: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """Return the error of a weighted mean, relative to the size of its addends."""
    used = [(weight, value) for weight, value in zip(weights, values, strict=True) if weight]
    total = math.fsum(weight for weight, _ in used)
    size = math.fsum(abs(weight * value) for weight, value in used)
    if not total or not size or not math.isfinite(size):
        return math.inf
    return abs(math.fsum(weight * value for weight, value in used) - total * wanted) / size


def _misfit(candidate: Candidate, name: str, whole: Evaluation, parts: Sequence[Evaluation]) -> float:
    """Return the smaller error of two readings: sum over weight, or a sum that is a mean already."""
    try:
        weights = [candidate.count(part.micro) for part in parts]
    except (RuntimeError, IndexError):  # classes without a weight
        return math.inf
    means = misfit(weights, [part.mean(name) for part in parts], whole.mean(name))
    return min(means, misfit(weights, [part.sums[name] for part in parts], whole.sums[name]))
