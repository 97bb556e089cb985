"""Rows and how they are parted, of tensors or of samples, as a batch of its own for each pass."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybatch.check.choose import subset
from anybatch.check.copies import widen
from anybatch.check.rows import Part
from anybatch.core import Batch, Collate, SampleBatch, TensorBatch, cut_sizes, tree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Rows, and how they are parted.

    Args:
        given: nested tensors, or samples.
        micro_batch: rows of each micro-batch.
        part: which rows of the whole batch these are.
        collate: for samples.
    """

    given: Any
    micro_batch: int
    part: Part
    collate: Collate | None = None

    @property
    def parts(self) -> list[Part]:
        """The rows of each micro-batch."""
        ends = [0]
        for size in cut_sizes(len(self.part.rows), self.micro_batch):
            ends.append(ends[-1] + size)
        return [Part(self.part.rows[start:stop], self.part.total) for start, stop in itertools.pairwise(ends)]

    @property
    def words(self) -> str:
        """The sizes, as in 3+3+2."""
        sizes = [len(part.rows) for part in self.parts]
        return "1 by 1" if sizes[:1] == [1] else "+".join(map(str, sizes))

    def only(self, rows: Sequence[int]) -> "Cut":
        """Some of the rows, uncut.

        Args:
            rows: their places in this cut.
        """
        part = Part(tuple([self.part.rows[row] for row in rows]), self.part.total)
        given = subset(self.given, self.collate, rows)
        return replace(self, given=given, micro_batch=len(rows), part=part)

    def batch(self, dtype: torch.dtype | None) -> Batch:
        """The batch, of tensors of its own, in which floating numbers have this dtype."""

        def own(leaf: Tensor) -> Tensor:
            return widen(leaf.detach().clone(), dtype)

        if self.collate is None:
            return TensorBatch(tree.map_leaves(own, self.given))
        collate = self.collate
        return SampleBatch(self.given, lambda samples: tree.map_leaves(own, collate(samples)))
