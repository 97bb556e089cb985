"""Denominators to try: rows, elements, valid entries, masks, sums of class weights."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.losses import TARGET_KEYS

CLASSES = 10_000  # a longer list holds something else
MASKS = 4  # as many are tried in pairs
FILLS = (-100, 0, -1)  # what fills up targets most often: torch's and Hugging Face's, zero, scikit-learn's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """Something that might be the denominator.

    Attributes:
        words: what it counts.
        code: how it is counted, of a micro-batch called `micro`.
        count: counts it, given the leaves of a micro-batch.
    """

    words: str
    code: str
    count: Callable[[Sequence[Tensor]], float]


def candidates(batch: Any, weights: Mapping[str, Tensor]) -> list[Candidate]:
    """What a loss of this batch may have to be divided by, the plainest first.

    Args:
        batch: nested tensors.
        weights: tensors of one axis that the loss or the model holds, by their names.

    Example:
        >>> for candidate in candidates({"y": torch.tensor([3, -100])}, {}):
        ...     print(candidate.words, "|", candidate.code, "|", candidate.count([torch.tensor([3, -100])]))
        the rows | len(micro['y']) | 2.0
        the elements of micro['y'] | micro['y'].numel() | 2.0
        the entries of micro['y'] that are not -100 | (micro['y'] != -100).sum() | 1.0
        ...
    """
    nest = tree.flatten(batch)
    names = ["micro" + path if path != "the batch itself" else "micro" for path in nest.paths]
    found = [Candidate(words="the rows", code=f"len({names[0]})", count=lambda leaves: float(len(leaves[0])))]
    for index, name in enumerate(names):
        found.append(
            Candidate(
                words=f"the elements of {name}",
                code=f"{name}.numel()",
                count=lambda leaves, index=index: float(leaves[index].numel()),
            )
        )
    # Targets are what is counted most often: by their name, or because they come last.
    order = sorted(range(len(names)), key=lambda index: (not _is_target(nest.paths[index]), -index))
    for index in order:
        found += list(_of_leaf(index, names[index], nest.leaves[index]))
    found += _of_pairs(names, nest.leaves)
    for index in order:
        name, leaf = names[index], nest.leaves[index]
        if _is_class(leaf):
            found += [_of_classes(index, name, key, weight, leaf) for key, weight in weights.items()]
    return found


def _of_leaf(index: int, name: str, leaf: Tensor) -> Iterator[Candidate]:
    views: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [(name, name, lambda value: value)]
    if leaf.dim() > 1 and leaf.shape[1] > 1:
        views.append((f"{name} (shifted by one)", f"{name}[:, 1:]", lambda value: value[:, 1:]))
    for words, code, view in views:
        if _is_class(leaf):
            last = [int(value) for value in leaf.reshape(-1)[-1:]]
            for fill in dict.fromkeys((*FILLS, *last)):
                yield Candidate(
                    words=f"the entries of {words} that are not {fill}",
                    code=f"({code} != {fill}).sum()",
                    count=lambda leaves, view=view, fill=fill: float((view(leaves[index]) != fill).sum()),
                )
        if leaf.dtype == torch.bool:
            yield Candidate(
                words=f"the entries of {words} that are not set",
                code=f"(~{code}).sum()",
                count=lambda leaves, view=view: float((~view(leaves[index])).sum()),
            )
        if bool((leaf >= 0).all()) if not leaf.is_complex() else False:
            yield Candidate(
                words=f"the sum of {words}",
                code=f"{code}.sum()",
                count=lambda leaves, view=view: float(view(leaves[index]).double().sum()),
            )
        if code != name:
            yield Candidate(
                words=f"the elements of {words}",
                code=f"{code}.numel()",
                count=lambda leaves, view=view: float(view(leaves[index]).numel()),
            )
    if leaf.is_floating_point() and bool(leaf.isnan().any()):
        yield Candidate(
            words=f"the entries of {name} that are not NaN",
            code=f"(~{name}.isnan()).sum()",
            count=lambda leaves: float((~leaves[index].isnan()).sum()),
        )
    if _is_class(leaf) and leaf.dim() == 1 and bool((leaf >= 1).all()):
        yield Candidate(
            words=f"the sum of {name}, less one for each row",
            code=f"({name} - 1).sum()",
            count=lambda leaves: float((leaves[index] - 1).sum()),
        )
    if _is_class(leaf) and leaf.dim() > 1:
        for fill in FILLS:
            yield Candidate(
                words=f"the rows of {name} with an entry that is not {fill}",
                code=f"({name} != {fill}).flatten(1).any(1).sum()",
                count=lambda leaves, fill=fill: float((leaves[index] != fill).flatten(1).any(1).sum()),
            )


def _of_pairs(names: Sequence[str], leaves: Sequence[Tensor]) -> Iterator[Candidate]:
    """Two masks at once."""
    masks = [index for index, leaf in enumerate(leaves) if leaf.dim() > 1 and _is_mask(leaf)]
    for one, other in itertools.combinations(masks[:MASKS], 2):
        if leaves[one].shape == leaves[other].shape:
            yield Candidate(
                words=f"the entries that both {names[one]} and {names[other]} count",
                code=f"({names[one]} * {names[other]}).sum()",
                count=lambda leaves, one=one, other=other: float((leaves[one] * leaves[other]).sum()),
            )


def _of_classes(index: int, name: str, key: str, weight: Tensor, leaf: Tensor) -> Candidate:
    values = weight.detach()

    def count(leaves: Sequence[Tensor]) -> float:
        labels = leaves[index].long()
        valid = (labels >= 0) & (labels < len(values))
        return float(torch.where(valid, values[torch.where(valid, labels, 0)], 0).double().sum())

    code = f"{key}[{name}].sum()" if int(leaf.min()) >= 0 else f"{key}[{name}[{name} >= 0]].sum()"
    return Candidate(words=f"the sum of the class weights {key}[{name}]", code=code, count=count)


def _is_mask(leaf: Tensor) -> bool:
    return leaf.dtype == torch.bool or bool(((leaf == 0) | (leaf == 1)).all())


def _is_target(path: str) -> bool:
    return any(path in (f"[{key!r}]", f".{key}") for key in TARGET_KEYS)


def _is_class(leaf: Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def held_weights(*holders: Any) -> dict[str, Tensor]:
    """Real tensors of one axis held by functions, modules and partial losses: class weights, perhaps.

    Example:
        >>> list(held_weights(partial(nn.functional.cross_entropy, weight=torch.ones(3))))
        ['weight']
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for holder in holders:
        _gather("", holder, found, seen)
    return found


def _gather(name: str, value: Any, found: dict[str, Tensor], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.dim() == 1 and value.is_floating_point():
            found.setdefault(name or "weight", value)
    elif isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        if 1 < len(items) <= CLASSES and all(isinstance(item, int | float) for item in items):
            found.setdefault(f"torch.tensor({name})", torch.tensor(items, dtype=torch.float64))
    elif isinstance(value, FunctionType):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                _gather(key, cell.cell_contents, found, seen)
            except ValueError:  # a cell that is still empty
                continue
        for key in value.__code__.co_names:
            _gather(key, value.__globals__.get(key), found, seen)
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = value.__defaults__ or ()
        for key, default in (
            *zip(names[::-1], defaults[::-1], strict=False),
            *(value.__kwdefaults__ or {}).items(),
        ):
            _gather(key, default, found, seen)
    elif isinstance(value, partial):
        held = cast("partial[Any]", value)
        _gather(name, held.func, found, seen)
        for index, item in enumerate(held.args):
            _gather(f"args[{index}]", item, found, seen)
        for key, item in held.keywords.items():
            _gather(key, item, found, seen)
    elif isinstance(value, nn.Module):
        for prefix, module in value.named_modules():
            plain = {key: item for key, item in vars(module).items() if isinstance(item, Tensor)}
            for key, item in (plain | dict(module.named_buffers(recurse=False))).items():
                _gather(f"{prefix}.{key}".strip("."), item, found, seen)
        function = getattr(value, "function", None)  # an observed one
        if function is not None:
            _gather(name, function, found, seen)
    elif hasattr(value, "__self__"):
        owner = value.__self__
        _gather(name, owner, found, seen)
        if not isinstance(owner, nn.Module):  # a trainer that holds weights
            for key, item in getattr(owner, "__dict__", {}).items():
                _gather(f"self.{key}", item, found, seen)
        _gather(name, getattr(value, "__func__", None), found, seen)
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        for key, item in vars(value).items():
            _gather(key, item, found, seen)
