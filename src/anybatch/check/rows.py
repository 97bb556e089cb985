"""Rows of a check, their split into micro-batches, and their padding"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, Cut, Padding, SampleBatch, TrimmedBatch
from anybatch.losses import find_paddings
from anybatch.trial import RowPart


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows and their split into micro-batches."""

    batch: Batch
    part: RowPart  # which rows of the whole batch these are
    micro_batch: int  # rows of each micro-batch

    @staticmethod
    def uncut(batch: Batch) -> "Rows":
        """Return all rows of a batch as one micro-batch."""
        return Rows(batch, RowPart.whole(batch.rows), batch.rows)

    @property
    def parts(self) -> list[RowPart]:
        """The rows of each micro-batch."""
        return [self.part.only(rows) for rows in Cut.even(self.batch.rows, self.micro_batch).parts]

    @property
    def words(self) -> str:
        """The sizes, as in 3+3+2."""
        sizes = "+".join([str(len(part.rows)) for part in self.parts])
        return ("1 by 1" if self.micro_batch == 1 else sizes) + " from the last" * (not self.part.is_whole)

    def cut(self, micro_batch: int) -> "Rows":
        """Return the same rows in micro-batches of a size."""
        return replace(self, micro_batch=micro_batch)

    def only(self, rows: Sequence[int]) -> "Rows":
        """Return some of the rows, uncut."""
        return Rows(self.batch.only(rows), self.part.only(rows), len(rows))


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two tensors are equal up to rounding, with infinities and NaN at the same places."""
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    one, other = one[finite], other[finite]
    # Divide by the largest entry: the square of a mask's fill value may overflow.
    size = max([value.abs().max().item() for value in (one, other) if len(value)], default=0.0) or 1.0
    return torch.linalg.vector_norm((one - other) / size).item() <= tolerance * math.sqrt(len(one))


def find_padding(batch: Any, model: nn.Module) -> Padding | None:
    """Return the first padding that some row has."""
    return next((one for one in find_paddings(batch, model) if min(one.valid) < one.length), None)


def trimmed(batch: Batch, padding: Padding) -> Batch:
    """Return the same rows, each micro-batch trimmed to its longest row."""
    rows = range(batch.rows)
    short = TrimmedBatch(batch.whole, [padding], rows)
    return SampleBatch(rows, lambda samples: next(short.micro_batches([samples])).rows)
