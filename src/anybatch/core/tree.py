"""Nested tensors: tuples, lists, mappings and dataclasses, flattened and rebuilt."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import setitem
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from anybatch.core.errors import BatchError

Build = Callable[[Iterator[Tensor]], Any]
_PLAIN = (Tensor, str, bytes, int, float)
_PAIR = ("[0]", "[1]")
_FIRST = re.compile(r"\[(.*?)\](?=[\[.]|$)|\.(\w+)")


class Nest(NamedTuple):
    """The tensors of a nested value, their paths, and a function that rebuilds it with other tensors."""

    paths: tuple[str, ...]
    leaves: tuple[Tensor, ...]
    build: Build


def flatten(tree: object, *, keeps: bool = False, path: str = "") -> Nest:
    """Return the tensors of a nested value with their paths.

    Containers: tuple and named tuple, list, any mapping (also `BatchEncoding`), dataclass instance. Leaves:
    tensors and None; others raise BatchError, because they could not be cut along with rows, unless the
    nest `keeps` them; `path` is where the value stands. A mapping that cannot be copied or written to is
    rebuilt as a plain dict.
    """
    if type(tree) is tuple and len(tree) == 2 and type(tree[0]) is type(tree[1]) is Tensor:
        return Nest(_PAIR, tree, tuple)  # the usual batch, at a fraction of the time
    paths, leaves = list[str](), list[Tensor]()
    build = _visit(tree, path, paths, leaves, keeps)
    return Nest(tuple(paths), tuple(leaves), build)


def column(path: str) -> str:
    """Return the `repr` of the key, position or field at the top of a nest below which a path leads.

    Example:
        >>> column("['x'][0]"), column("[1]"), column(".mask")
        ("'x'", '1', "'mask'")
    """
    found = _FIRST.match(path)
    return path if found is None else found[1] or repr(found[2])


def map_leaves(function: Callable[[Tensor], Tensor], tree: object) -> Any:
    """Apply a function to every tensor of a nested value; return the same nest of the results."""
    nest = flatten(tree, keeps=True)
    return nest.build(function(leaf) for leaf in nest.leaves)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return all tensors in nested tuples, lists, mappings and dataclasses; other leaves are left out.

    A container that occurs several times is visited once: a nest may be a graph.
    """
    seen: dict[int, Any] = {}  # holds references, so that no id is reused
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        elif not isinstance(one, _PLAIN) and id(one) not in seen and (found := parts(one)):
            seen[id(one)] = one
            waiting += reversed(found)


def is_sequence(node: object) -> TypeGuard[Sequence[Any]]:
    """Return True for a tuple or a list, whose entries may be anything."""
    return isinstance(node, (tuple, list))  # `tuple | list` is not compiled by torch 2.6


def is_mapping(node: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return True for a mapping, whose keys and values may be anything."""
    return isinstance(node, Mapping)


def parts(node: object) -> list[Any] | None:
    """Return the items, values or fields of a container, in order; None if `node` is no container."""
    if is_sequence(node):
        return list(node)
    if is_mapping(node):
        return list(node.values())
    if not dataclasses.is_dataclass(node) or isinstance(
        node, type | nn.Module
    ):  # these may be dataclasses, too
        return None
    return [getattr(node, name) for name in _fields(node)]


def places(node: Any) -> list[str]:
    """Return the key, position or field of each of the `parts` of a container, as in a path."""
    if is_sequence(node):
        return [f"[{index}]" for index in range(len(node))]
    if is_mapping(node):
        return [f"[{key!r}]" for key in node]
    return [f".{name}" for name in _fields(node)]


def mould(node: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds the same kind of container from other parts, in the order of `parts`.

    It never writes to `node`. It does not keep a plain tuple, list or dict alive, so their tensors can be
    freed.
    """
    kind = type(node)
    if is_sequence(node):
        return getattr(kind, "_make", kind)  # a named tuple takes its fields one by one
    if is_mapping(node):
        keys = tuple(node)
        # Python's own copy of any other mapping may share its items with the caller's.
        copies_items = isinstance(node, dict) or hasattr(node, "__copy__")
        if kind is dict or not (copies_items and isinstance(node, MutableMapping)):
            return lambda fresh: dict(zip(keys, fresh, strict=True))
        return lambda fresh: _filled(node, setitem, keys, fresh)
    # The `__setattr__` of a frozen dataclass refuses.
    return lambda fresh: _filled(node, object.__setattr__, _fields(node), fresh)


def _filled(
    node: Any, put: Callable[[Any, Any, Any], None], keys: Sequence[Any], fresh: Sequence[Any]
) -> Any:
    other = copy.copy(node)  # which keeps the subclass and its other attributes (of a BatchEncoding)
    for key, part in zip(keys, fresh, strict=True):
        put(other, key, part)
    return other


def _fields(node: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]


def no_tensor(node: object, path: str) -> BatchError:
    """Return the error for what is no tensor."""
    advice = "Make it a tensor with one entry per row, or pass a list of samples to a step with a collate=."
    if type(node).__module__.startswith("numpy"):
        advice = "Make it a tensor with torch.from_numpy."
    elif isinstance(node, bool):
        advice = (
            "Pass a setting to the model in a loss function (model, micro); CLIP's loss is an ab.WholeBatch."
        )
    elif not path:
        advice = (
            "Make a DataLoader(dataset, batch_size=...); then, for batch in loader: step(batch), or "
            "ab.Trainer(step, loader).fit(epochs=...)."
        )
    return BatchError(
        f"Expected tensors (or None) at every leaf of a batch, got a {type(node).__name__} at "
        f"{path or 'the top'}. {advice}"
    )


def _visit(node: Any, path: str, paths: list[str], leaves: list[Tensor], keeps: bool) -> Build:
    if isinstance(node, Tensor):
        paths.append(path or "the batch itself")
        leaves.append(node)
        return next
    if node is None:
        return lambda rest: None
    found = parts(node)
    if found is None:
        if keeps:
            return lambda rest: node
        raise no_tensor(node, path)
    pairs = zip(places(node), found, strict=True)
    builds = [_visit(part, f"{path}{place}", paths, leaves, keeps) for place, part in pairs]
    fill = mould(node)
    return lambda rest: fill([build(rest) for build in builds])


def is_dense(value: Tensor) -> bool:
    """Return True if a tensor is neither sparse nor nested, so that rows can be cut from it."""
    return value.layout is torch.strided and not value.is_nested


# ---- tensors that ranks share (DTensor)


def is_shard(value: object) -> bool:
    """Return True for a DTensor, as the parameters of a sharded model are."""
    return type(value) is not Tensor and hasattr(type(value), "device_mesh")


def whole(value: Any) -> Tensor:
    """Return the whole of a tensor; for a DTensor a collective of all its ranks."""
    return value.full_tensor() if is_shard(value) else value
