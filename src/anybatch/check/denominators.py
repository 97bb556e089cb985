"""What a term is divided by: the candidate that makes all cuts agree; and gradients that add up, or not."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.check.outputs import Evaluation
from anybatch.check.rows import find_axis, take
from anybatch.core import tree
from anybatch.losses import TARGET_KEYS

CLASSES = 10_000  # a longer list holds something else
MASKS = 4  # as many are tried in pairs
FILLS = (-100, 0, -1)  # what fills up targets most often: torch's and Hugging Face's, zero, scikit-learn's


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Something that might be the denominator."""

    words: str  # what it counts
    code: str  # how it is counted, of a micro-batch called `micro`
    count: Callable[[Sequence[Tensor]], float]  # counts it, given the leaves of a micro-batch


# What may be counted of a tensor, in words and in code, with {} where its name belongs; and how.
Count = tuple[str, str, Callable[[Tensor], Tensor | int]]
ELEMENTS: Count = ("the elements of {}", "{}.numel()", lambda value: value.numel())


def candidates(batch: Any, weights: Mapping[str, Tensor]) -> list[Candidate]:
    """What a loss of this batch may have to be divided by, the plainest first."""
    nest = tree.flatten(batch)
    names = ["micro" + path if path != "the batch itself" else "micro" for path in nest.paths]
    found = [Candidate("the rows", f"len({names[0]})", lambda leaves: float(len(leaves[0])))]
    for index, name in enumerate(names):
        found += _of_view(index, name, name, [ELEMENTS], lambda leaf: leaf)
    # Targets are what is counted most often: by their name, or because they come last.
    order = sorted(range(len(names)), key=lambda index: (not _is_target(nest.paths[index]), -index))
    for index in order:
        found += _of_leaf(index, names[index], nest.leaves[index])
    found += _of_pairs(names, nest.leaves)
    for index in order:
        name, leaf = names[index], nest.leaves[index]
        if _is_class(leaf):
            found += [_of_classes(index, name, key, weight, leaf) for key, weight in weights.items()]
    return found


def _of_leaf(index: int, name: str, leaf: Tensor) -> Iterator[Candidate]:
    entries = list(_entries(leaf))
    yield from _of_view(index, name, name, entries, lambda leaf: leaf)
    if leaf.dim() > 1 and leaf.shape[1] > 1:
        words, code = f"{name} (shifted by one)", f"{name}[:, 1:]"
        yield from _of_view(index, words, code, [*entries, ELEMENTS], lambda leaf: leaf[:, 1:])
    yield from _of_view(index, name, name, _rows(leaf), lambda leaf: leaf)


def _of_view(
    index: int, words: str, code: str, counts: Iterable[Count], view: Callable[[Tensor], Tensor]
) -> Iterator[Candidate]:
    for what, how, count in counts:
        yield Candidate(
            what.format(words),
            how.format(code),
            lambda leaves, count=count: float(count(view(leaves[index]))),
        )


def _entries(leaf: Tensor) -> Iterator[Count]:
    if _is_class(leaf):
        last = [int(value) for value in leaf.reshape(-1)[-1:]]
        for fill in dict.fromkeys((*FILLS, *last)):
            words, code = f"the entries of {{}} that are not {fill}", f"({{}} != {fill}).sum()"
            yield words, code, lambda value, fill=fill: (value != fill).sum()
    if leaf.dtype == torch.bool:
        yield "the entries of {} that are not set", "(~{}).sum()", lambda value: (~value).sum()
    if not leaf.is_complex() and bool((leaf >= 0).all()):
        yield "the sum of {}", "{}.sum()", lambda value: value.double().sum()


def _rows(leaf: Tensor) -> Iterator[Count]:
    if leaf.is_floating_point() and bool(leaf.isnan().any()):
        yield (
            "the entries of {} that are not NaN",
            "(~{}.isnan()).sum()",
            lambda value: (~value.isnan()).sum(),
        )
    if _is_class(leaf) and leaf.dim() == 1 and bool((leaf >= 1).all()):
        yield "the sum of {}, less one for each row", "({} - 1).sum()", lambda value: (value - 1).sum()
    if _is_class(leaf) and leaf.dim() > 1:
        for fill in FILLS:
            words = f"the rows of {{}} with an entry that is not {fill}"
            code = f"({{}} != {fill}).flatten(1).any(1).sum()"
            yield words, code, lambda value, fill=fill: (value != fill).flatten(1).any(1).sum()


def _of_pairs(names: Sequence[str], leaves: Sequence[Tensor]) -> Iterator[Candidate]:
    """Two masks at once."""
    masks = [index for index, leaf in enumerate(leaves) if leaf.dim() > 1 and _is_mask(leaf)]
    for one, other in itertools.combinations(masks[:MASKS], 2):
        if leaves[one].shape == leaves[other].shape:
            yield Candidate(
                f"the entries that both {names[one]} and {names[other]} count",
                f"({names[one]} * {names[other]}).sum()",
                lambda leaves, one=one, other=other: float((leaves[one] * leaves[other]).sum()),
            )


def _of_classes(index: int, name: str, key: str, weight: Tensor, leaf: Tensor) -> Candidate:
    values = weight.detach()

    def count(leaves: Sequence[Tensor]) -> float:
        labels = leaves[index].long()
        valid = (labels >= 0) & (labels < len(values))
        return float(torch.where(valid, values[torch.where(valid, labels, 0)], 0).double().sum())

    code = f"{key}[{name}].sum()" if int(leaf.min()) >= 0 else f"{key}[{name}[{name} >= 0]].sum()"
    return Candidate(f"the sum of the class weights {key}[{name}]", code, count)


def _is_mask(leaf: Tensor) -> bool:
    return leaf.dtype == torch.bool or bool(((leaf == 0) | (leaf == 1)).all())


def _is_target(path: str) -> bool:
    return any(path in (f"[{key!r}]", f".{key}") for key in TARGET_KEYS)


def _is_class(leaf: Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def held_weights(*holders: Any) -> dict[str, Tensor]:
    """Real tensors of one axis held by functions, modules and partial losses: class weights, perhaps."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    left = [("", holder) for holder in reversed(holders)]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.dim() == 1 and value.is_floating_point():
                found.setdefault(name or "weight", value)
        elif isinstance(value, list | tuple):
            items = cast("list[Any]", value)
            if 1 < len(items) <= CLASSES and all(isinstance(item, int | float) for item in items):
                found.setdefault(f"torch.tensor({name})", torch.tensor(items, dtype=torch.float64))
        else:
            left += reversed(list(_inside(name, value)))
    return found


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a module or an object holds, by name."""
    if isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable of its closure that has no value yet
            held = inspect.getclosurevars(value)
            yield from (*held.nonlocals.items(), *held.globals.items())
            yield from ((key, one.default) for key, one in inspect.signature(value).parameters.items())
    elif isinstance(value, partial):
        partly = cast("partial[Any]", value)
        yield name, partly.func
        yield from ((f"args[{index}]", item) for index, item in enumerate(partly.args))
        yield from partly.keywords.items()
    elif isinstance(value, nn.Module):
        for prefix, module in value.named_modules():
            plain = {key: item for key, item in vars(module).items() if isinstance(item, Tensor)}
            for key, item in (plain | dict(module.named_buffers(recurse=False))).items():
                yield f"{prefix}.{key}".strip("."), item
        yield name, getattr(value, "function", None)  # of an observed one
    elif hasattr(value, "__self__"):
        yield name, value.__self__
        if not isinstance(value.__self__, nn.Module):  # a trainer that holds weights
            yield from (
                (f"self.{key}", item) for key, item in getattr(value.__self__, "__dict__", {}).items()
            )
        yield name, getattr(value, "__func__", None)
    elif callable(value) and not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()


# ---- which of them fits


Reading = Callable[[Evaluation], float]
Cuts = Sequence[Sequence[Evaluation]]  # the micro-batches of each cut

_EXACT = 1e-13  # float64 on few terms
_EPSILON = 1e-4  # what an epsilon in a denominator may leave of an error


def fit(
    options: Iterable[Candidate],
    readings: Sequence[Reading],
    whole: Evaluation,
    parted: Cuts,
    *,
    tolerance: float,
    error: float,
) -> tuple[Candidate, bool] | None:
    """The candidate that makes all cuts agree, and whether something small is left, as of an epsilon."""
    found = [
        (min(max(_misfit_of(one, read, whole, parts) for parts in parted) for read in readings), one)
        for one in options
    ]
    best = min((misfit for misfit, _ in found), default=math.inf)
    # Means of single terms lose less than gradients.
    if not parted or best > max(tolerance / 10, _EPSILON * min(error, 1.0)):
        return None
    # The first of those that fit as well as the best: in float32, and early in training when all tokens
    # cost about the same, wrong ones come close too.
    first = next(one for misfit, one in found if misfit <= max(10 * best, _EXACT))
    return first, best > tolerance / 10


def misfit(weights: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """How far a weighted mean is from what it should be, relative to what is added up."""
    used = [(weight, value) for weight, value in zip(weights, values, strict=True) if weight]
    total = math.fsum(weight for weight, _ in used)
    size = math.fsum(abs(weight * value) for weight, value in used)
    if not total or not size or not math.isfinite(size):
        return math.inf
    return abs(math.fsum(weight * value for weight, value in used) - total * wanted) / size


def _misfit_of(candidate: Candidate, read: Reading, whole: Evaluation, parts: Sequence[Evaluation]) -> float:
    try:
        weights = [candidate.count(part.leaves) for part in parts]
    except (RuntimeError, IndexError):
        return math.inf
    return misfit(weights, [read(part) for part in parts], read(whole))


def gradients_add_up(name: str, whole: Evaluation, parts: Sequence[Evaluation], tolerance: float) -> bool:
    """The gradient of a sum is, row by row, that of the parts' sums."""
    difference = size = 0.0
    for index, wanted in enumerate(whole.gradients[name]):
        if any(len(part.gradients[name]) != len(whole.gradients[name]) for part in parts):
            return True  # outputs that cannot be told apart
        pieces = [part.gradients[name][index] for part in parts]
        shares = [take(wanted, p.shape, part.part) for p, part in zip(pieces, parts, strict=True)]
        if any(share is None for share in shares):
            continue
        if all(piece.shape == wanted.shape for piece in pieces):  # one value for all rows
            pairs = [(sum(pieces[1:], start=pieces[0]), wanted)]
        else:
            pairs = [(p, s) for p, s in zip(pieces, shares, strict=True) if s is not None]
        difference += sum((a - b).square().sum().item() for a, b in pairs)
        size += sum(a.square().sum().item() + b.square().sum().item() for a, b in pairs)
    return difference**0.5 <= tolerance * size**0.5


def left_out(name: str, whole: Evaluation, parted: Cuts) -> list[int]:
    """Rows into whose outputs no gradient flows in one cut, while it does in another."""
    unused: set[int] = set()
    used: set[int] = set()
    first = parted[0][0] if parted and parted[0] else whole
    for one in (whole, *[part for parts in parted for part in parts]):
        for index, gradients in enumerate(one.gradients[name]):
            peers = first.gradients[name], whole.gradients[name]
            if any(index >= len(peer) for peer in peers):
                continue
            axis = find_axis(peers[1][index].shape, peers[0][index].shape, first.part)
            if axis is None:
                continue
            there = gradients.unflatten(axis.place, (len(one.part.rows), axis.per_row))
            flows = there.movedim(axis.place, 0).flatten(1).any(1).tolist()
            used |= {row for row, flow in zip(one.part.rows, flows, strict=True) if flow}
            unused |= {row for row, flow in zip(one.part.rows, flows, strict=True) if not flow}
    return sorted(unused & used)
