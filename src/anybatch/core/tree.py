"""Nested tensors: tuples, lists, mappings and dataclasses, flattened and rebuilt."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

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
    return _tensors_in(value, {})


def _tensors_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, _PLAIN) and id(value) not in seen:
        found = parts(value)
        if found:
            seen[id(value)] = value  # a reference, so that the id is not reused
            for one in found:
                yield from _tensors_in(one, seen)


def parts(node: object) -> list[Any] | None:
    """Return the items, values or fields of a container, in order; None if `node` is no container."""
    if isinstance(node, (tuple, list)):  # `tuple | list` is not compiled by torch 2.6
        return list(cast("Sequence[Any]", node))
    if isinstance(node, Mapping):
        return list(cast("Mapping[Any, Any]", node).values())
    return [getattr(node, name) for name in _fields(node)] if _is_record(node) else None


def places(node: Any) -> list[str]:
    """Return the key, position or field of each of the `parts` of a container, as in a path."""
    if isinstance(node, (tuple, list)):
        return [f"[{index}]" for index in range(len(cast("Sequence[Any]", node)))]
    if isinstance(node, Mapping):
        return [f"[{key!r}]" for key in cast("Mapping[Any, Any]", node)]
    return [f".{name}" for name in _fields(node)]


def mould(node: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds the same kind of container from other parts, in the order of `parts`.

    It never writes to `node`. It does not keep a plain tuple, list or dict alive, so their tensors can be
    freed.
    """
    kind: Any = type(node)
    if isinstance(node, (tuple, list)):
        return getattr(kind, "_make", kind)  # a named tuple takes its fields one by one
    if isinstance(node, Mapping):
        known = cast("Mapping[Any, Any]", node)
        keys = tuple(known)
        # Python's own copy of any other mapping may share its items with the caller's.
        copies_items = isinstance(known, dict) or hasattr(known, "__copy__")
        if kind is dict or not (copies_items and isinstance(known, MutableMapping)):
            return lambda fresh: dict(zip(keys, fresh, strict=True))
        return lambda fresh: _with_items(copy.copy(known), keys, fresh)
    return lambda fresh: _with_fields(copy.copy(node), fresh)


def _with_items(other: Any, keys: Sequence[Any], fresh: Sequence[Any]) -> Any:
    # A copy keeps the subclass and its other attributes (a BatchEncoding, a ModelOutput).
    for key, part in zip(keys, fresh, strict=True):
        other[key] = part
    return other


def _with_fields(other: Any, fresh: Sequence[Any]) -> Any:
    for name, part in zip(_fields(other), fresh, strict=True):
        object.__setattr__(other, name, part)  # also for frozen dataclasses
    return other


def _is_record(node: object) -> bool:
    # A module or a class may be a dataclass, too.
    return dataclasses.is_dataclass(node) and not isinstance(node, type | nn.Module)


def _fields(node: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]


def _advice(node: object, path: str) -> str:
    if type(node).__module__.startswith("numpy"):
        return "Make it a tensor with torch.from_numpy."
    if isinstance(node, bool):
        return (
            "Pass a setting to the model in a loss function (model, micro); CLIP's loss is an ab.WholeBatch."
        )
    if not path:
        return (
            "Make a DataLoader(dataset, batch_size=...); then, for batch in loader: step(batch), or "
            "ab.Trainer(step, loader).fit(epochs=...)."
        )
    return "Make it a tensor with one entry per row, or pass a list of samples to a step with a collate=."


def no_tensor(node: object, path: str) -> BatchError:
    """Return the error for what is no tensor."""
    return BatchError(
        f"Expected tensors (or None) at every leaf of a batch, got a {type(node).__name__} at "
        f"{path or 'the top'}. {_advice(node, path)}"
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
