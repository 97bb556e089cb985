"""The rows of an epoch: tensors in memory or a list of samples, shuffled by a seed."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from anybatch.core import BatchError, SampleBatch, TensorBatch, tree
from anybatch.state import rng
from anybatch.step import Step


class Rows:
    """All rows of a data set, taken one logical batch at a time.

    Args:
        data: any nesting of tensors with rows first; or, where the step has a `collate`, anything with a
            length that gives a sample for an index (a list, a map-style data set).
        step: whose `collate` and device the rows are for.

    Raises:
        BatchError: the data is neither (a loader of batches needs no trainer: call the step in its loop).
    """

    def __init__(self, data: Any, step: Step) -> None:
        if isinstance(data, DataLoader):
            raise BatchError(
                f"Expected all rows, as tensors or as samples with a collate, got a {type(data).__name__} of "
                "batches. Call the step on each of its batches yourself, or pass its dataset here and its "
                "collate_fn to the step."
            )
        self._step, self._data = step, data
        self._samples = step.collate is not None
        batch = TensorBatch(data) if step.collate is None else SampleBatch(data, step.collate)
        self.count = batch.rows

    def batches(self, *, batch_size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield an epoch's logical batches, in the order that seed and epoch determine, from `start` on.

        Tensors come on the model's device; what is collated is the caller's to bring there.
        """
        generator = torch.Generator().manual_seed(rng.derive_seed(seed, "order", epoch))
        order = torch.randperm(self.count, generator=generator, device="cpu")  # whatever torch's default
        for chosen in order.split(batch_size)[start:]:
            yield self._take(chosen)

    def in_order(self, size: int) -> Iterator[Any]:
        """Yield all rows in their own order, `size` at a time, for an evaluation."""
        if not self._samples:
            device = self._device()
            for micro in TensorBatch(self._data).cut(size):
                yield tree.map_leaves(lambda leaf: _bring(leaf, device), micro)
            return
        for first in range(0, self.count, size):
            yield [self._data[row] for row in range(first, min(first + size, self.count))]

    def _take(self, chosen: torch.Tensor) -> Any:
        if self._samples:
            return [cast("Sequence[Any]", self._data)[row] for row in chosen.tolist()]
        device = self._device()
        return tree.map_leaves(
            lambda leaf: _bring(leaf.index_select(0, chosen.to(leaf.device)), device), self._data
        )

    def _device(self) -> torch.device:
        return next(self._step.model.parameters()).device


def _bring(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; a copy to the host is waited for, or it would be read too early."""
    return leaf.to(device, non_blocking=device.type == "cuda")
