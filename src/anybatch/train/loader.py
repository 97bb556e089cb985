"""The batches of an epoch: from rows in memory, shuffled by a seed, or from an iterable loader."""

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from anybatch.core import BatchError, CheckpointError, TensorBatch, accelerator, tree
from anybatch.parallel import Packer, digest_of
from anybatch.state import rng
from anybatch.step import Step
from anybatch.train.share import Share, as_batch


class Rows:
    """All rows of a data set in memory, in logical batches.

    The data is nested tensors with rows first; or, if the step has a `collate`, an object with a length that
    returns a sample for an index (a list, a map-style data set).
    """

    def __init__(self, data: Any, step: Step) -> None:
        self._step, self._data, self.share = step, data, Share(step)
        self.count = as_batch(data, step).rows

    def per_epoch(self, batch_size: int | None) -> int:
        """Return the number of batches of an epoch."""
        return -(-self.count // (batch_size or self.count))

    def batches(
        self, *, batch_size: int | None, seed: int, epoch: int, start: int = 0, digest: str = ""
    ) -> Generator[Any]:
        """Yield this rank's rows of an epoch's logical batches from `start` on; None for a batch without any.

        The order depends on seed and epoch only. Tensors are on the model's device; samples are unchanged.
        """
        generator = torch.Generator().manual_seed(rng.derive_seed(seed, "order", epoch))
        order = torch.randperm(self.count, generator=generator, device="cpu")  # not torch's default device
        for chosen in order.split(batch_size or self.count)[start:]:
            mine = chosen[self.share.part(len(chosen))]
            yield self._take(mine) if len(mine) else None

    def in_order(self, size: int | None) -> Iterator[Any]:
        """Yield all rows in order, `size` at a time, for an evaluation; ranks take turns."""
        for index, chosen in enumerate(torch.arange(self.count, device="cpu").split(size or self.count)):
            if self.share.has_turn(index):
                yield self._take(chosen)

    def _take(self, chosen: torch.Tensor) -> Any:
        if self._step.collate is not None:
            return [cast("Sequence[Any]", self._data)[row] for row in chosen.tolist()]
        here = {one: chosen.to(one) for one in {leaf.device for leaf in tree.flatten(self._data).leaves}}
        rows = tree.map_leaves(lambda leaf: leaf.index_select(0, here[leaf.device]), self._data)
        return _brought(rows, self._step)


class Stream:
    """The items of a DataLoader or of another iterable, in logical batches.

    The data gives the same items after the same seed and `set_epoch`. Loading draws from separate random
    streams, seeded for each epoch: an epoch can be repeated, and loading does not change the model's random
    numbers.
    """

    def __init__(self, data: Any, step: Step) -> None:
        if isinstance(data, Iterator):
            raise BatchError(
                f"Expected data that can be iterated anew in each epoch, got a {type(data).__name__}, which "
                "can be iterated once. Pass an object whose __iter__ begins again, or a list."
            )
        self._data, self._step, self.share = data, step, Share(step)
        # Items are lists of samples, not samples.
        self._gives_lists = (
            step.collate is not None
            and isinstance(data, DataLoader)
            and cast("Any", data).batch_sampler is not None
        )
        self.count = self._count()  # rows of an epoch; None if unknown before iterating
        self._last: Any = None  # the last batch, for `digest`
        self.loaded = 0  # its number in its epoch

    def per_epoch(self, batch_size: int | None) -> int | None:
        """Return the number of batches of an epoch; None if unknown before iterating."""
        if batch_size is None:
            return _length(self._data)
        return None if self.count is None else -(-self.count // batch_size)

    def digest(self) -> str:
        """Return the SHA-256 of the last batch, to check a repeated epoch; empty for unsupported objects."""
        packer = Packer()
        try:
            document = packer.pack(self._last, "batch")
        except CheckpointError:
            return ""
        return digest_of(packer.tensors, json.dumps(document))

    def batches(
        self, *, batch_size: int | None, seed: int, epoch: int, start: int = 0, digest: str = ""
    ) -> Generator[Any]:
        """Yield this rank's rows of an epoch's batches; load and drop the first `start` batches.

        A `batch_size` of None means one batch per item. `digest` is that of the last dropped batch: these
        must be as before, and of all ranks the same.
        """
        count = 0
        for batch in self._repeatable(batch_size, rng.derive_seed(seed, "order", epoch), epoch):
            count += 1
            self._last, self.loaded = batch, count
            if count == start and digest not in ("", self.digest()):
                raise CheckpointError(self._differs(f"other rows in batch {count}", epoch))
            if count == start + 1 and self.share.is_many:
                self.share.meet_with_same(self.digest(), f"batch {count} of epoch {epoch + 1}")
            if count > start:
                yield _brought(self.share.of(batch), self._step)
        self._last = None
        if count < start:
            raise CheckpointError(self._differs(f"{count} batches where it had {start}", epoch))
        if not count:
            raise self._is_empty(f"epoch {epoch + 1}")

    def in_order(self, size: int | None) -> Iterator[Any]:
        """Yield all rows, `size` at a time or one item at a time, for an evaluation; always the same rows."""
        count = 0
        for batch in self._repeatable(size, rng.derive_seed(0, "validation"), 0):
            if self.share.has_turn(count):
                yield _brought(batch, self._step)
            count += 1
        if not count:
            raise self._is_empty("a validation")

    def _repeatable(self, size: int | None, seed: int, epoch: int) -> Iterator[Any]:
        apart, end = rng.OwnStreams(seed), object()
        batch_sampler = getattr(self._data, "batch_sampler", None)
        parts = [getattr(self._data, name, None) for name in ("dataset", "sampler")]
        for part in (self._data, *parts, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(seed)
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        with apart.drawn():  # a DataLoader draws random numbers at the start
            batches = iter(self._data) if size is None else self._gathered(size)
        while True:
            with apart.drawn():
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def _gathered(self, size: int) -> Iterator[Any]:
        """Yield batches of `size` rows from items of any number of rows; the last may be smaller."""
        held: list[Any] = []
        rows = 0
        for item in self._data:
            found = self._samples(item)
            held += found
            rows += TensorBatch(item).rows if self._step.collate is None else len(found)
            while rows >= size:
                batch, held = self._split(held, size)
                rows -= size
                yield batch
        if rows:
            yield self._split(held, rows)[0]

    def _split(self, held: list[Any], size: int) -> tuple[Any, list[Any]]:
        if self._step.collate is not None:
            return held[:size], held[size:]
        whole = TensorBatch(_joined(held))
        rest = [whole.only(range(size, whole.rows)).given] if whole.rows > size else []
        return whole.only(range(size)).given, rest

    def _samples(self, item: Any) -> list[Any]:
        if not self._gives_lists:
            return [item]
        if not isinstance(item, list):
            raise BatchError(
                f"Expected lists of samples from the loader, because the step has a `collate`, got a "
                f"{type(item).__name__}. Pass collate_fn=list to the loader or give the step no `collate`."
            )
        return cast("list[Any]", item)

    def _count(self) -> int | None:
        loader: Any = self._data
        if not isinstance(loader, DataLoader):
            return None if self._step.collate is None else _length(loader)
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            return None
        rows, size = _length(loader.sampler), loader.batch_size
        return rows if rows is None or not loader.drop_last else rows // size * size

    def _is_empty(self, place: str) -> BatchError:
        advice = "Pass data that can be iterated anew in each epoch, and is not empty."
        if getattr(self._data, "drop_last", False):
            advice = (
                "drop_last=True leaves out a batch that is not full: set it to False, or batch_size lower."
            )
        return BatchError(
            f"Expected a batch in {place}, got none from the {type(self._data).__name__}. {advice}"
        )

    def _differs(self, what: str, epoch: int) -> str:
        return (
            f"Expected the {type(self._data).__name__} to give epoch {epoch + 1} as before, got {what}. "
            "Let its order depend on nothing but torch's, Python's and NumPy's random numbers and on "
            "set_epoch(epoch), or go on from a checkpoint at the end of an epoch."
        )


def open_data(data: Any, step: Step) -> Rows | Stream:
    """Return `Rows` for data in memory, `Stream` for iterables; raise BatchError for other data."""
    is_stream = isinstance(data, DataLoader | IterableDataset) or (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    )
    return Stream(data, step) if is_stream else Rows(data, step)


def _brought(batch: Any, step: Step) -> Any:
    if step.collate is not None or batch is None:
        return batch
    device = next(step.model.parameters()).device
    # A copy to the host must be complete before it is read.
    return tree.map_leaves(lambda leaf: leaf.to(device, non_blocking=accelerator.has_streams(device)), batch)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _joined(items: list[Any]) -> Any:
    if len(items) == 1:
        return items[0]
    nests = [tree.flatten(item) for item in items]
    try:
        leaves = [torch.cat(alike) for alike in zip(*[nest.leaves for nest in nests], strict=True)]
    except (RuntimeError, ValueError) as error:
        raise BatchError(
            f"Expected items whose rows can be put together to batches, got others ({error}). Let the loader "
            "give whole batches (batch_size=None), or lists of samples and give the step a `collate`."
        ) from None
    return nests[0].build(iter(leaves))
