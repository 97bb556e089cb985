"""Columns of rows: lists with one entry for each row, such as the boxes of each image, cut as tensors are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import Batch, Collate, SampleBatch, TensorBatch
from anybatch.core.errors import BatchError


def batch_of(value: Any, collate: Collate | None = None) -> Batch:
    """Return the rows of a batch.

    A list below the top of a batch is a column if it has one entry for each row, and its entries are not
    tensors with the rows in their first axis: mappings, strings, numbers, tensors of other sizes. A batch
    with columns becomes samples, and a `collate` that puts some of them into the caller's form.

    Args:
        value: a nest of tensors with the rows first, and of columns; with a `collate` a list of samples.
        collate: builds a micro-batch from some samples.

    Raises:
        BatchError: sizes disagree, or a leaf has no rows.

    Example:
        >>> images = torch.zeros(3, 8)
        >>> labels = [{"boxes": torch.zeros(count, 4)} for count in (2, 0, 1)]
        >>> [len(micro[1]) for micro in batch_of((images, labels)).cut(2)]
        [2, 1]
    """
    if collate is not None:
        return SampleBatch(value, collate)
    if type(value) is tuple and {*map(type, value)} == {Tensor}:
        return TensorBatch(value)  # the usual case
    ends = dict(_ends_of(value, "", lambda node: node is not value and _is_list(node)))
    lists = {path: one for path, one in ends.items() if tree.is_sequence(one)}
    is_list = isinstance(value, list)
    lone = value if is_list else []
    if _are_alike(lone) and {len(lone)} >= _sizes_in(lone):
        raise BatchError(
            f"Expected tensors with the rows of the batch in front, got a list of {len(lone)} dicts, as if "
            "each were a sample. Pass collate= and a list of samples; if they are no samples, a dict in "
            "place of the list."
        )
    beside = {_size_of(one) for one in ends.values() if isinstance(one, Tensor)}
    rows = _rows_of(beside, lists, is_list=is_list) if lists else 0
    if not rows:
        return TensorBatch(value)
    column = _column(value, "", rows, is_top=True)
    return ColumnBatch([*map(column.row, range(rows))], column.collate)


class ColumnBatch(SampleBatch):
    """Rows of a batch with columns, as samples; a step that gets them has no `collate` of its own."""

    __slots__ = ()

    draws = False


class _Column(NamedTuple):
    row: Callable[[int], Any]  # what belongs to a row
    collate: Callable[[Any], Any]  # what belongs to some rows, in the caller's form


def _rows_of(beside: set[int | None], lists: Mapping[str, Sequence[Any]], *, is_list: bool) -> int:
    """Return the number of rows if a list is a column of them; 0 if none is.

    Args:
        beside: the first sizes of tensors that are in no list.
        lists: by path.
        is_list: they are the entries of a list, as samples may be.
    """
    lengths = {*map(len, lists.values())}
    sizes = beside or set().union(*map(_sizes_in, lists.values()))
    has_labels = any(map(_are_alike, lists.values()))
    if not beside and is_list and not has_labels:
        return 0  # samples
    if not beside and (len(sizes) != 1 or (len(lists) > 1 and has_labels)):
        sizes = lengths  # images of several sizes; images and their labels
    rows = next(iter(sizes), None) or 0
    ends = [end for path, one in lists.items() for end in _ends_of(one, path, partial(_is_column, rows))]
    columns = [(path, one) for path, one in ends if tree.is_sequence(one)]
    if not columns or len(beside) > 1:  # tensors that disagree: a batch of tensors says so
        return 0
    for path, one in columns:
        for at, entry in enumerate(one):  # rows as lists of numbers are meant to be a tensor
            if tree.is_sequence(entry):
                tree.flatten(entry, path=f"{path}[{at}]")
        shapes = {getattr(entry, "shape", None) for entry in one}
        shape = shapes.pop() if beside and len(shapes) == 1 else None
        if len(one) != rows or shape is not None:
            said = f"tensors of shape {tuple(shape)}: stack them if they are rows" if shape else "entries"
            if rows in (sizes := [len(entry) for entry in one if isinstance(entry, Tensor) and entry.dim()]):
                said = f"tensors of {sizes} rows: pad targets that lie one after the other (of CTC)"
            raise BatchError(
                f"Expected a list with one entry for each of the {rows} rows at {path}, or tensors with the "
                f"rows in their first axis, got {len(one)} {said}. What all rows share belongs in the model "
                "or the loss."
            )
    return rows


def _ends_of(node: Any, path: str, is_end: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest, and what is an end in it, by path; not what ends hold."""
    found = None if is_end(node) else tree.parts(node)
    if found is None:
        yield path, node
    else:
        for place, one in zip(tree.places(node), found, strict=True):
            yield from _ends_of(one, f"{path}{place}", is_end)


def _sizes_in(entries: Sequence[Any]) -> set[int | None]:
    """Return the first sizes of all tensors in a list; None among them for other entries."""
    try:
        return {*map(_size_of, tree.flatten(entries).leaves)}
    except BatchError:
        return {None}


def _size_of(leaf: Tensor) -> int | None:
    return leaf.size(0) if leaf.dim() else None


def _is_column(rows: int, node: Any) -> bool:
    """Return False for a list of tensors of all rows, as several targets are, and for one without tensors."""
    return _is_list(node) and (not _sizes_in(node) <= {rows} or (_are_alike(node) and len(node) == rows))


def _column(node: Any, path: str, rows: int, *, is_top: bool = False) -> _Column:
    if isinstance(node, Tensor):
        return _Column(node.__getitem__, torch.stack)
    if node is None:
        return _Column(_nothing, _nothing)
    if not is_top and _is_column(rows, node):
        return _Column(node.__getitem__, tree.mould(node))
    found = tree.parts(node)
    if found is None:
        raise tree.no_tensor(node, path)
    places = zip(tree.places(node), found, strict=True)
    inner, fill = [_column(one, f"{path}{place}", rows) for place, one in places], tree.mould(node)

    def row(at: int) -> list[Any]:
        return [one.row(at) for one in inner]

    def collate(several: Sequence[Any]) -> Any:
        return fill([one.collate(each) for one, each in zip(inner, zip(*several, strict=True), strict=True)])

    return _Column(row, collate)


def _nothing(_: Any) -> None:
    pass


def _is_list(node: Any) -> bool:
    return tree.is_sequence(node) and not hasattr(node, "_fields") and len(node) > 0


def _are_alike(entries: Sequence[Any]) -> bool:
    """Return True for mappings with the same keys, as labels of samples are."""
    kinds = {frozenset(one) if isinstance(one, Mapping) else None for one in entries}
    return len(kinds) == 1 and None not in kinds
