"""Where the rows of an epoch come from: tensors in memory or a list of samples, shuffled by a seed."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from anybatch import rng, tree
from anybatch.batch import SampleBatch, TensorBatch
from anybatch.step import Step


class Rows:
    """All rows of a data set, taken one logical batch at a time.

    Args:
        data: any nesting of tensors with rows first; or, where the step has a `collate`, anything with a
            length that gives a sample for an index (a list, a map-style data set).
        step: whose `collate` and device the rows are for.

    Raises:
        BatchError: the data is neither (a loader of batches needs no trainer: call the step in its loop).

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> rows = Rows((torch.zeros(5, 2), torch.zeros(5, 1)), step)
        >>> [len(x) for x, _ in rows.batches(batch_size=2, seed=0, epoch=0)]
        [2, 2, 1]
    """

    def __init__(self, data: Any, step: Step) -> None:
        self._samples = step.collate is not None
        if self._samples:
            self._data = data
            self.count = SampleBatch(data, cast("Any", step.collate)).rows
            return
        self.count = TensorBatch(data).rows
        self._data = data

    def batches(self, *, batch_size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield an epoch's logical batches, in the order that seed and epoch determine, from `start` on."""
        order = torch.randperm(
            self.count, generator=torch.Generator().manual_seed(rng.derive_seed(seed, "order", epoch))
        )
        for chosen in order.split(batch_size)[start:]:
            yield self._take(chosen)

    def in_order(self, size: int) -> Iterator[Any]:
        """Yield all rows in their own order, `size` at a time, for an evaluation."""
        if not self._samples:
            yield from TensorBatch(self._data).cut(size)
            return
        for first in range(0, self.count, size):
            yield [self._data[row] for row in range(first, min(first + size, self.count))]

    def _take(self, chosen: torch.Tensor) -> Any:
        if self._samples:
            return [cast("Sequence[Any]", self._data)[row] for row in chosen.tolist()]
        return tree.map_leaves(lambda leaf: leaf.index_select(0, chosen.to(leaf.device)), self._data)
