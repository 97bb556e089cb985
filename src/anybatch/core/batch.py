"""A logical batch cut into micro-batches: every row once, in order, the ragged tail kept."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.errors import BatchError

Collate = Callable[[list[Any]], Any]

_dtype_and_axes = attrgetter("dtype", "ndim")
_SHOWN = 4  # tensors in an error
_NAMED = 32  # rows in an error


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of rows into micro-batches, in the order in which they run.

    Example:
        >>> cut = Cut.even(10, 4)
        >>> cut.sizes, cut.of_at_most(3).parts
        ((4, 4, 2), (range(0, 3), range(3, 6), range(6, 9), range(9, 10)))
    """

    parts: tuple[Sequence[int], ...]  # row indices of each micro-batch; a `range` if they are adjacent

    @staticmethod
    def even(rows: int, micro_batch: int) -> "Cut":
        """Return parts of `micro_batch` rows, in order; the last part holds the remaining rows."""
        return Cut.of_sizes(cut_sizes(rows, micro_batch))

    @staticmethod
    def of_sizes(sizes: Sequence[int]) -> "Cut":
        """Return parts of these sizes, in order."""
        stops = accumulate(sizes)
        return Cut(tuple([range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each micro-batch."""
        return tuple(map(len, self.parts))

    def halved(self) -> "Cut":
        """Return the cut with each part of two or more rows split in two."""
        return Cut(tuple([half for part in self.parts for half in _split(part, -(-len(part) // 2))]))

    def of_at_most(self, most: int) -> "Cut":
        """Return the same rows, in order, in parts of at most `most` rows."""
        parts = self.parts
        is_row_after_row = parts and _are_adjacent(parts)
        rows = range(parts[0][0], parts[-1][-1] + 1) if is_row_after_row else [*chain.from_iterable(parts)]
        return Cut((*_split(rows, most),))


def _split(rows: Sequence[int], most: int) -> list[Sequence[int]]:
    return [rows[start : start + most] for start in range(0, len(rows), most)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Padding positions at the end or the start of rows."""

    length: int  # length of the padded rows
    valid: tuple[int, ...]  # number of positions of each row that are not padding
    source: str  # the mask, token or labels that mark padding, in words
    axes: tuple[tuple[int, int], ...] = ()  # (index of a tensor, its axis of this length)
    is_left: bool = False  # True if padding is at the start


class Micro(NamedTuple):
    """A micro-batch."""

    rows: Any  # nested tensors, in the form of the batch
    indices: Sequence[int]  # the indices of these rows in the batch


class Batch:
    """All rows of one optimizer step. This base class has no rows."""

    __slots__ = ()

    rows: int = 0
    given: Any = None  # the value that the caller passed
    whole: Any = None  # all rows as nested tensors; None if each micro-batch is collated separately
    draws = False  # True if cutting may draw random numbers, as a `collate` may
    order: Sequence[int] = ()  # the caller's row at each position; empty if the order is the caller's
    leaves: Sequence[Tensor] = ()  # tensors with rows first; none if each micro-batch is collated separately
    paddings: Sequence[Padding] = ()  # that each micro-batch leaves out
    # A key that rows of any length share: dtypes and numbers of dimensions, and what is trimmed.
    kind: tuple[Any, ...] = ()
    # A key that rows of the same kind share: dtypes and sizes of one row, as far as known.
    like: Hashable = ()
    trimmed: Sequence[str] = ()  # paths of the tensors that are trimmed, each once

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """Yield the rows in order, `micro_batch` at a time; the last micro-batch holds the remaining rows."""
        # A generator of this would hold each micro-batch until the next one is made.
        return map(itemgetter(0), self.micro_batches(Cut.even(self.rows, micro_batch).parts))

    def micro_batches(self, parts: Sequence[Sequence[int]]) -> Iterator[Micro]:
        """Yield the rows of each part, with their indices."""
        return iter(())

    def only(self, indices: Sequence[int]) -> "Batch":
        """Return a batch of these rows."""
        return self

    def copied(self) -> "Batch":
        """Return the same rows in new memory: a model may change its input in place."""
        return self

    def padded(self) -> "Batch":
        """Return the same rows in the same order, with the caller's padding."""
        return self

    def callers(self, places: Sequence[int]) -> Sequence[int]:
        """Return the caller's rows at these positions."""
        return [self.order[place] for place in places] if self.order else places

    def rows_in_words(self, start: int, stop: int) -> str:
        """Return the caller's rows at positions from `start` to before `stop`, for an error message."""
        if not self.order:
            return f"rows {start} to {stop - 1}"
        rows = sorted(self.callers(range(start, stop)))
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        return f"rows {', '.join(map(str, rows[:_NAMED]))}{more}"


def cut_sizes(rows: int, micro_batch: int) -> list[int]:
    """Return the number of rows of each micro-batch; none of no rows."""
    full, rest = divmod(rows, micro_batch or 1)
    return [micro_batch] * full + [rest] * (rest > 0)


class TensorBatch(Batch):
    """Nested tensors of shape (rows, ...), else BatchError; micro-batches are views."""

    __slots__ = ("_nest", "given", "kind", "leaves", "rows", "whole")

    def __init__(self, value: object) -> None:
        self._nest = tree.flatten(value)
        self.leaves = self._nest.leaves  # in order of the nest
        self.kind = (*map(_dtype_and_axes, self.leaves),)
        self.rows = _common_rows(self._nest, value)
        self.given = self.whole = value

    @property
    def like(self) -> Hashable:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype of each leaf and its size in one row."""
        return tuple([(leaf.dtype, leaf.shape[1:]) for leaf in self._nest.leaves])

    def micro_batches(self, parts: Sequence[Sequence[int]]) -> Iterator[Micro]:
        """Yield views of adjacent rows, else copies; a single part of all rows is the caller's value."""
        if len(parts) == 1 and parts[0] == range(self.rows):
            yield Micro(self.whole, parts[0])
            return
        build, every = self._nest.build, self._nest.leaves
        if not _are_adjacent(parts):
            for index in parts:
                yield Micro(build(_chosen(every, index)), index)
            return
        start, stop, sizes = parts[0][0], parts[-1][-1] + 1, [*map(len, parts)]
        # One call per leaf makes all its views; cutting view by view costs Python time in every micro-batch.
        views = [leaf[start:stop].split_with_sizes(sizes) for leaf in every]
        for index, leaves in zip(parts, zip(*views, strict=True), strict=True):
            yield Micro(build(iter(leaves)), index)

    def only(self, indices: Sequence[int]) -> "TensorBatch":
        """Return a batch of these rows: views for a `range`, else copies."""
        return TensorBatch(next(self.micro_batches([indices])).rows)

    def copied(self) -> "TensorBatch":
        """Return a batch with copies of all tensors."""
        return TensorBatch(copied(self.whole))


class TrimmedBatch(TensorBatch):
    """Rows in another order; each micro-batch is a copy, trimmed to its longest row.

    Value and paddings, such as those of encoder and decoder, are in the caller's order.
    """

    __slots__ = ("order", "paddings")

    def __init__(self, value: object, paddings: Sequence[Padding], order: Sequence[int]) -> None:
        super().__init__(value)
        self.paddings, self.order = tuple(paddings), order
        self.kind += tuple([(one.axes, one.is_left) for one in paddings])

    @property
    def trimmed(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Paths of the tensors that are trimmed, each once."""
        short = [one for one in self.paddings if min(one.valid) < one.length]
        return list(dict.fromkeys(self._nest.paths[leaf] for one in short for leaf, _ in one.axes))

    def keeping(self, column: str) -> "TrimmedBatch":
        """Return the same rows, of which this column (`tree.column`) is not trimmed."""
        kept = {at for at, path in enumerate(self._nest.paths) if tree.column(path) == column}
        left = [tuple([axis for axis in one.axes if axis[0] not in kept]) for one in self.paddings]
        paddings = [replace(one, axes=axes) for one, axes in zip(self.paddings, left, strict=True)]
        return TrimmedBatch(self.whole, paddings, self.order)

    def micro_batches(self, parts: Sequence[Sequence[int]]) -> Iterator[Micro]:
        """Yield each part, trimmed to its longest row."""
        for index in parts:
            rows = self.callers(index)
            leaves = [*self.leaves]
            for padding in self.paddings:
                longest = max(1, *[padding.valid[row] for row in rows])
                start = padding.length - longest if padding.is_left else 0
                for leaf, axis in padding.axes:
                    leaves[leaf] = leaves[leaf].narrow(axis, start, longest)
            # A model may need contiguous tensors: views of shorter rows are not.
            yield Micro(self._nest.build(_chosen(leaves, rows)), index)

    def only(self, indices: Sequence[int]) -> "TrimmedBatch":
        """Return a batch of these rows, trimmed in the same way."""
        rows = self.callers(indices)
        paddings = [replace(one, valid=tuple([one.valid[row] for row in rows])) for one in self.paddings]
        return TrimmedBatch(TensorBatch(self.whole).only(rows).whole, paddings, range(len(rows)))

    def copied(self) -> "TrimmedBatch":
        """Return a batch with copies of all tensors."""
        return TrimmedBatch(copied(self.whole), self.paddings, self.order)

    def padded(self) -> TensorBatch:
        """Return the same rows in the same order, with the caller's padding."""
        return TensorBatch(self.whole).only(self.order)


class SampleBatch(Batch):
    """A list of samples, cut first; each micro-batch is collated separately, so padding stays short."""

    # Never collated as a whole (`whole`): that would need the memory the cut saves.
    __slots__ = ("collate", "given", "order", "rows")

    draws = True

    def __init__(self, samples: Sequence[Any], collate: Collate, order: Sequence[int] = ()) -> None:
        self.rows, self.order, self.collate = _num_samples(samples), order, collate
        self.given = samples

    def micro_batches(self, parts: Sequence[Sequence[int]]) -> Iterator[Micro]:
        """Yield each part, collated."""
        for index in parts:
            yield Micro(self.collate([self.given[row] for row in self.callers(index)]), index)

    def only(self, indices: Sequence[int]) -> "SampleBatch":
        """Return a batch of these samples."""
        return SampleBatch([self.given[row] for row in self.callers(indices)], self.collate)

    def copied(self) -> "SampleBatch":
        """Return the same samples; tensors are copied after they are collated."""
        collate = self.collate
        return SampleBatch(self.given, lambda samples: copied(collate(samples)), self.order)


class NoRows(Batch):
    """The batch of a rank without rows, in a step where other ranks have some."""

    __slots__ = ()


class OpenBatch(Batch):
    """The null batch of a window: its rows come later, one micro-batch at a time."""

    __slots__ = ()


def _chosen(leaves: Iterable[Tensor], rows: Sequence[int]) -> Iterator[Tensor]:
    places = torch.tensor(rows)
    return (leaf.index_select(0, places.to(leaf.device)) for leaf in leaves)


def copied(rows: Any) -> Any:
    """Return a nest of tensors with copies of all of them."""
    return tree.map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad), rows)


def _are_adjacent(parts: Sequence[Sequence[int]]) -> bool:
    stops = [part.stop if isinstance(part, range) and part.step == 1 else -1 for part in parts]
    return min(stops) > 0 and all(part[0] == stop for part, stop in zip(parts[1:], stops, strict=False))


def _common_rows(nest: tree.Nest, value: object) -> int:
    if not nest.leaves:
        raise BatchError(
            f"Expected a tensor in the batch, got {type(value).__name__}. Pass the tensors of all rows; a "
            "collate_fn without `return` gives None."
        )
    rows = nest.leaves[0].size(0) if nest.leaves[0].dim() else -1  # a nested tensor has no shape
    for path, leaf in zip(nest.paths, nest.leaves, strict=True):
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise BatchError(
                f"Expected dense tensors in a batch, to cut them by rows, got a {kind} tensor at {path}. "
                "Make it dense, or pass a list of samples and a collate= that builds it from some of them."
            )
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            raise BatchError(_disagreement(nest, value))
    if rows == 0:
        raise BatchError(
            f"Expected at least one row, got an empty batch: {_shapes(nest)}. "
            "Skip empty batches before the step."
        )
    return rows


def _disagreement(nest: tree.Nest, value: Any) -> str:
    message = (
        f"Expected all tensors of a batch to agree in their first axis (the rows), got {_shapes(nest)}. "
        "Give each tensor one entry per row; what all rows share belongs in the model or the loss, and "
        "what is made of several rows (packed lengths, all boxes one after the other) in a collate=."
    )
    if not isinstance(value, list) or (len(value) <= _SHOWN and isinstance(value[0], Tensor)):
        return message  # as for [inputs, targets]
    return f"{message} A list of samples needs collate=, for instance torch.utils.data.default_collate."


def _shapes(nest: tree.Nest) -> str:
    places = [(path, tuple(leaf.shape)) for path, leaf in zip(nest.paths, nest.leaves, strict=True)]
    shown = places
    if len(places) > _SHOWN:
        odd = [one for one in places if one[1][:1] != places[0][1][:1]]
        shown = [places[0], *odd][:_SHOWN]
    more = f", … and {len(places) - len(shown):,} more" if len(shown) < len(places) else ""
    return ", ".join(f"{path}: {shape}" for path, shape in shown) + more


def _num_samples(samples: Any) -> int:
    indexed = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if not indexed or isinstance(samples, Tensor | Mapping):
        raise BatchError(
            f"Expected a list of samples, because `collate` was given, got {type(samples).__name__}. "
            "Pass a list with one entry per row, or leave `collate` out and pass tensors."
        )
    if len(samples) == 0:
        raise BatchError(
            f"Expected at least one sample, got {samples!r}. Skip empty batches before the step."
        )
    return len(samples)
