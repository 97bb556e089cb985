"""Rows of a check, and their split into micro-batches"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.check.subject import widen
from anybatch.core import Batch, Collate, Cut, Padding, SampleBatch, TensorBatch, TrimmedBatch, tree
from anybatch.losses import find_paddings
from anybatch.trial import RowPart, take


def agree(
    whole: Tensor, pieces: Sequence[tuple[Tensor, RowPart]], tolerance: float, *, from_end: bool = False
) -> bool | None:
    """Return True if the tensors of micro-batches are those of the whole; None if that cannot be told."""
    expected = [take(whole, piece.shape, part, from_end=from_end) for piece, part in pieces]
    found = [value for value in expected if value is not None]
    if len(found) < len(pieces):
        return None
    return all(is_close(piece, value, tolerance) for (piece, _), value in zip(pieces, found, strict=True))


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two tensors are equal up to rounding, with infinities and NaN at the same places."""
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    one, other = one[finite], other[finite]
    if not one.numel():
        return True
    size = other.abs().max().item() or one.abs().max().item()
    # Divide by the largest entry: the square of a mask's fill value may overflow.
    difference = torch.linalg.vector_norm((one - other) / (size or 1.0)).item()
    return difference <= tolerance * math.sqrt(one.numel())


def rows_of(batch: Any, collate: Collate | None) -> int:
    """Return the number of rows of a batch."""
    return (TensorBatch(batch) if collate is None else SampleBatch(batch, collate)).rows


def subset(batch: Any, collate: Collate | None, rows: Sequence[int]) -> Any:
    """Return a copy of these rows."""
    if collate is not None:
        return [batch[row] for row in rows]
    return tree.map_leaves(lambda leaf: leaf.detach()[list(rows)], batch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCut:
    """Rows and their split into micro-batches."""

    data: Any  # nested tensors, or samples
    micro_batch: int  # rows of each micro-batch
    part: RowPart  # which rows of the whole batch these are
    collate: Collate | None = None  # for samples

    @property
    def parts(self) -> list[RowPart]:
        """The rows of each micro-batch."""
        return [self.part.only(rows) for rows in Cut.even(len(self.part.rows), self.micro_batch).parts]

    @property
    def words(self) -> str:
        """The sizes, as in 3+3+2."""
        sizes = [len(part.rows) for part in self.parts]
        return "1 by 1" if sizes[:1] == [1] else "+".join(map(str, sizes))

    def only(self, rows: Sequence[int]) -> "RowCut":
        """Return some of the rows, uncut."""
        data = subset(self.data, self.collate, rows)
        return replace(self, data=data, micro_batch=len(rows), part=self.part.only(rows))

    def batch(self, dtype: torch.dtype | None) -> Batch:
        """Return a batch of copies, with floating tensors in a dtype."""

        def own(leaf: Tensor) -> Tensor:
            return widen(leaf.detach().clone(), dtype)

        if self.collate is None:
            return TensorBatch(tree.map_leaves(own, self.data))
        collate = self.collate
        return SampleBatch(self.data, lambda samples: tree.map_leaves(own, collate(samples)))


def find_padding(batch: Any, model: nn.Module) -> Padding | None:
    """Return the first padding that some row has."""
    return next((one for one in find_paddings(batch, model) if min(one.valid) < one.length), None)


def trimmed(whole: RowCut, padding: Padding, micro_batch: int) -> RowCut:
    """Return the same rows, each micro-batch trimmed to its longest row."""
    rows = range(len(whole.part.rows))
    batch = TrimmedBatch(whole.data, [padding], rows)

    def collate(rows: list[int]) -> Any:
        return next(batch.micro_batches([rows])).rows

    return RowCut(data=rows, micro_batch=micro_batch, part=whole.part, collate=collate)
