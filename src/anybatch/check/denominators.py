"""Denominators: counts of a batch that may divide a term, and the one that makes all splits agree"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.losses import TARGET_KEYS
from anybatch.state import Reachable

FILLS = (-100, 0, -1)  # common fill values of targets: torch's and Hugging Face's, zero, scikit-learn's


class Candidate(NamedTuple):
    """A possible denominator."""

    words: str
    code: str  # Python code that counts it in `micro`, with class weights by their names


def candidates(batch: Any, weights: Mapping[str, Tensor]) -> Iterator[Candidate]:
    """Yield what a loss of this batch may have to be divided by, the plainest first."""
    nest = tree.flatten(batch)
    names = ["micro" + path if path != "the batch itself" else "micro" for path in nest.paths]
    yield Candidate("the rows", f"len({names[0]})")
    yield from [_elements(name, name) for name in names]
    # Targets are counted most often: by their name, or because they come last.
    is_target = [any(path in (f"[{key!r}]", f".{key}") for key in TARGET_KEYS) for path in nest.paths]
    order = sorted(range(len(names)), key=lambda index: (not is_target[index], -index))
    for name, leaf in [(names[index], nest.leaves[index]) for index in order]:
        yield from _counts(leaf, name, name)
        if leaf.dim() > 1 and leaf.shape[1] > 1:
            words, code = f"{name} (shifted by one)", f"{name}[:, 1:]"
            yield from [*_counts(leaf, words, code), _elements(words, code)]
    for name, leaf in [
        (names[index], nest.leaves[index]) for index in order if _is_class(nest.leaves[index])
    ]:
        valid = name if int(leaf.min()) >= 0 else f"{name}[{name} >= 0]"
        for key in weights:
            yield Candidate(f"the sum of the class weights {key}[{name}]", f"{key}[{valid}].sum()")


def _elements(words: str, code: str) -> Candidate:
    return Candidate(f"the elements of {words}", f"{code}.numel()")


def _counts(leaf: Tensor, words: str, code: str) -> Iterator[Candidate]:
    if _is_class(leaf):
        for fill in dict.fromkeys((*FILLS, *[int(value) for value in leaf.reshape(-1)[-1:]])):
            yield Candidate(f"the entries of {words} that are not {fill}", f"({code} != {fill}).sum()")
    if not leaf.is_complex() and bool((leaf >= 0).all()):
        yield Candidate(f"the sum of {words}", f"{code}.sum()")


def _is_class(leaf: Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def held_weights(*holders: Any) -> dict[str, Tensor]:
    """Return real tensors of one axis that functions, modules and objects hold, by name: class weights."""
    found = Reachable(holders)
    tables = [
        *[scope for scope, _ in found.scopes],
        *[one for one in found.containers if isinstance(one, dict)],
    ]
    names = {id(value): key for table in tables for key, value in table.items() if str(key).isidentifier()}
    tensors = [one for one in found.values if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
    weights = {id(one): one for one in reversed(tensors) if one.dim() == 1 and one.is_floating_point()}
    return {names.get(at, "weight"): one.detach().double() for at, one in weights.items()}


def misfit(weights: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """Return the error of a weighted mean, relative to the size of its addends."""
    used = [(weight, value) for weight, value in zip(weights, values, strict=True) if weight]
    total = math.fsum(weight for weight, _ in used)
    size = math.fsum(abs(weight * value) for weight, value in used)
    if not total or not size or not math.isfinite(size):
        return math.inf
    return abs(math.fsum(weight * value for weight, value in used) - total * wanted) / size
