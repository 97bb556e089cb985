"""Nested tensors: take tuples, lists, mappings and dataclasses apart, and build the same nest again."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from anybatch.errors import BatchError

Build = Callable[[Iterator[Tensor]], Any]


class Nest(NamedTuple):
    """The tensors of a nested value, their places, and what builds the same nest around other tensors."""

    paths: tuple[str, ...]
    leaves: tuple[Tensor, ...]
    build: Build


def flatten(tree: object) -> Nest:
    """Take a nested value apart into its tensors.

    Containers: tuple and named tuple, list, any mapping (also `BatchEncoding`), dataclass instance. Leaves:
    tensors. `None` stays where it is. Anything else is refused, because it could not be cut along with rows.

    A mapping that cannot be copied, or not written to, comes back as a plain dict.

    Raises:
        BatchError: a leaf is neither a tensor nor None; the message names its place.

    Example:
        >>> import torch
        >>> nest = flatten({"x": torch.zeros(4, 2), "y": (torch.ones(4), None)})
        >>> nest.paths
        ("['x']", "['y'][0]")
        >>> nest.build(iter([leaf[:1] for leaf in nest.leaves]))
        {'x': tensor([[0., 0.]]), 'y': (tensor([1.]), None)}
    """
    paths: list[str] = []
    leaves: list[Tensor] = []
    build = _visit(tree, "", paths, leaves)
    return Nest(tuple(paths), tuple(leaves), build)


def map_leaves(function: Callable[[Tensor], Tensor], tree: object) -> Any:
    """Apply a function to every tensor of a nested value and build the same nest around the results.

    Example:
        >>> import torch
        >>> map_leaves(lambda leaf: leaf + 1, (torch.zeros(2), [torch.ones(1)]))
        (tensor([1., 1.]), [tensor([2.])])
    """
    nest = flatten(tree)
    return nest.build(function(leaf) for leaf in nest.leaves)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings, a model's outputs too; the rest is left out.

    Example:
        >>> import torch
        >>> [leaf.shape[0] for leaf in tensors_in(([torch.zeros(1), None], {"x": (torch.zeros(2), 3)}))]
        [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in cast("Sequence[Any]", value):
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        for one in cast("Mapping[Any, Any]", value).values():
            yield from tensors_in(one)


def _visit(node: Any, path: str, paths: list[str], leaves: list[Tensor]) -> Build:
    """Append the tensors below `node` and return what builds `node` again."""
    if isinstance(node, Tensor):
        paths.append(path or "the batch itself")
        leaves.append(node)
        return next
    if node is None:
        return lambda rest: None
    if isinstance(node, tuple | list):
        return _visit_sequence(cast("tuple[Any, ...] | list[Any]", node), path, paths, leaves)
    if isinstance(node, Mapping):
        return _visit_mapping(cast("Mapping[Any, Any]", node), path, paths, leaves)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        builds = [_visit(getattr(node, name), f"{path}.{name}", paths, leaves) for name in names]
        return lambda rest: _refill(node, names, builds, rest)
    raise BatchError(
        f"Expected tensors (or None) at every leaf of a batch, got {_describe(node)} at {path or 'the top'}. "
        "Turn it into a tensor with one entry per row, or hand over a list of samples and a `collate`."
    )


def _visit_sequence(node: Any, path: str, paths: list[str], leaves: list[Tensor]) -> Build:
    builds = [_visit(child, f"{path}[{index}]", paths, leaves) for index, child in enumerate(node)]
    kind: Any = type(node)
    if kind is tuple:
        return lambda rest: tuple([build(rest) for build in builds])
    if hasattr(kind, "_make"):  # a named tuple takes its fields one by one
        return lambda rest: kind._make([build(rest) for build in builds])
    return lambda rest: kind([build(rest) for build in builds])


def _visit_mapping(node: Mapping[Any, Any], path: str, paths: list[str], leaves: list[Tensor]) -> Build:
    builds = {key: _visit(child, f"{path}[{key!r}]", paths, leaves) for key, child in node.items()}
    # Python's own copy of any other mapping may share its items with the caller's.
    copies_items = isinstance(node, dict) or hasattr(node, "__copy__")
    if type(node) is dict or not (copies_items and isinstance(node, MutableMapping)):
        return lambda rest: {key: build(rest) for key, build in builds.items()}

    def build(rest: Iterator[Tensor]) -> Any:
        # A copy keeps the subclass and what it carries besides its items (a BatchEncoding, a ModelOutput).
        fresh: Any = copy.copy(node)
        for key, child in builds.items():
            fresh[key] = child(rest)
        return fresh

    return build


def _refill(node: Any, names: list[str], builds: list[Build], rest: Iterator[Tensor]) -> Any:
    fresh = copy.copy(node)
    for name, build in zip(names, builds, strict=True):
        object.__setattr__(fresh, name, build(rest))  # also for frozen dataclasses
    return fresh


def _describe(node: object) -> str:
    hint = " (torch.from_numpy makes it a tensor)" if type(node).__module__.startswith("numpy") else ""
    return f"a {type(node).__name__}{hint}"
