"""A logical batch cut into micro-batches: every row once, in order, the ragged tail kept."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from anybatch.core import tree
from anybatch.core.errors import BatchError

Collate = Callable[[list[Any]], Any]

_SHOWN = 4  # tensors in an error


class Batch(Protocol):
    """All rows of one optimizer step, ready to be cut."""

    @property
    def rows(self) -> int:
        """Number of rows, at least 1."""
        ...

    @property
    def given(self) -> Any:
        """What the caller handed over."""
        ...

    @property
    def whole(self) -> Any:
        """All rows as nested tensors, or None where they are collated only micro-batch by micro-batch."""
        ...

    @property
    def like(self) -> Hashable:
        """What rows of the same kind have in common: the dtypes and sizes of one row, as far as known."""
        ...

    @property
    def draws(self) -> bool:
        """Whether cutting may draw random numbers, as a `collate` may."""
        ...

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """Yield the rows in order, `micro_batch` at a time; the last micro-batch holds what is left."""
        ...

    def parts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Yield the rows from `start` on, in order, in parts of these sizes, which reach to the end."""
        ...

    def head(self, rows: int) -> "Batch":
        """A batch of the first rows."""
        ...


def cut_sizes(rows: int, micro_batch: int) -> list[int]:
    """Rows of each micro-batch.

    Example:
        >>> cut_sizes(10, 4)
        [4, 4, 2]
    """
    full, rest = divmod(rows, micro_batch)
    return [micro_batch] * full + [rest] * (rest > 0)


class TensorBatch:
    """A nested value whose tensors agree in their first axis; micro-batches are views, nothing is copied.

    Args:
        value: any nesting of tensors of shape (rows, ...).

    Raises:
        BatchError: no tensor, no row, a tensor without a first axis, or first axes that disagree.

    Example:
        >>> import torch
        >>> batch = TensorBatch((torch.arange(5), torch.zeros(5, 2)))
        >>> [x.tolist() for x, _ in batch.cut(2)]
        [[0, 1], [2, 3], [4]]
    """

    __slots__ = ("_nest", "given", "rows", "whole")

    draws = False

    def __init__(self, value: object) -> None:
        self._nest = tree.flatten(value)
        self.rows = _common_rows(self._nest, value)
        self.given: Any = value
        self.whole: Any = value

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors, in order of the nest."""
        return self._nest.leaves

    @property
    def like(self) -> Hashable:
        """The dtype of each leaf and its size in one row."""
        return tuple([(leaf.dtype, leaf.shape[1:]) for leaf in self._nest.leaves])

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """Yield nested values of views, `micro_batch` rows at a time; uncut, the very value that came in."""
        return self.parts(cut_sizes(self.rows, micro_batch))

    def parts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Yield nested values of views, of these sizes; uncut, the very value that came in."""
        if sizes[0] == self.rows:
            yield self.whole
            return
        build, leaves = self._nest.build, self._nest.leaves
        # One call per leaf makes all its views; cutting view by view costs Python time in every micro-batch.
        for parts in zip(*[_from(leaf, start).split_with_sizes(sizes) for leaf in leaves], strict=True):
            yield build(iter(parts))

    def head(self, rows: int) -> "TensorBatch":
        """A batch of the first rows, as views."""
        return TensorBatch(self._nest.build(iter([leaf[:rows] for leaf in self._nest.leaves])))


class SampleBatch:
    """A list of samples, cut first and collated micro-batch by micro-batch, so padding stays short.

    Args:
        samples: one entry per row.
        collate: builds the nested tensors of a micro-batch from a list of samples.

    Raises:
        BatchError: no sample, or something that cannot be indexed.

    Example:
        >>> import torch
        >>> batch = SampleBatch([1, 2, 3], torch.tensor)
        >>> [micro.tolist() for micro in batch.cut(2)]
        [[1, 2], [3]]
    """

    __slots__ = ("collate", "given", "rows", "whole")

    like = ()  # nobody knows before they are collated
    draws = True

    def __init__(self, samples: Sequence[Any], collate: Collate) -> None:
        self.rows = _num_samples(samples)
        self.given: Any = samples
        self.collate = collate
        self.whole: Any = None  # never collated as a whole: that would need the memory the cut saves

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """Yield collated micro-batches of `micro_batch` samples."""
        return self.parts(cut_sizes(self.rows, micro_batch))

    def parts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Yield collated micro-batches of as many samples as given."""
        for stop in itertools.islice(itertools.accumulate(sizes, initial=start), 1, None):
            yield self.collate([self.given[row] for row in range(start, stop)])
            start = stop

    def head(self, rows: int) -> "SampleBatch":
        """A batch of the first samples."""
        return SampleBatch([self.given[row] for row in range(min(rows, self.rows))], self.collate)


class OpenBatch:
    """The null batch of a window: its rows come one micro-batch at a time, nothing is known of the whole."""

    __slots__ = ()

    rows = 0
    given: Any = None
    whole: Any = None
    like = ()
    draws = False

    def cut(self, micro_batch: int) -> Iterator[Any]:
        """Yield nothing: the caller brings the micro-batches."""
        return iter(())

    def parts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())

    def head(self, rows: int) -> "OpenBatch":
        """Itself: there are none."""
        return self


def _from(leaf: Tensor, start: int) -> Tensor:
    return leaf[start:] if start else leaf


def _common_rows(nest: tree.Nest, value: object) -> int:
    if not nest.leaves:
        raise BatchError(
            f"Expected at least one tensor in the batch, got {len(nest.leaves)}. "
            "Pass the tensors of all rows."
        )
    rows = nest.leaves[0].shape[0] if nest.leaves[0].dim() else -1
    for leaf in nest.leaves:
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            raise BatchError(_disagreement(nest, value))
    if rows == 0:
        raise BatchError(
            f"Expected at least one row, got an empty batch: {_shapes(nest)}. "
            "Skip empty batches before the step."
        )
    return rows


def _disagreement(nest: tree.Nest, value: object) -> str:
    message = (
        f"Expected all tensors of a batch to agree in their first axis (the rows), got {_shapes(nest)}. "
        "Give each tensor one entry per row; what all rows share belongs in the model or the loss."
    )
    if not isinstance(value, list):
        return message
    entries = cast("list[Any]", value)
    if len(entries) <= _SHOWN and isinstance(entries[0], Tensor):  # as in [inputs, targets]
        return message
    return f"{message} A list of samples needs collate=, for instance torch.utils.data.default_collate."


def _shapes(nest: tree.Nest) -> str:
    """Of many tensors the first one and the first of those that disagree with it."""
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
