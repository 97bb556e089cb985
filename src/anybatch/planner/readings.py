"""Readings of memory: bytes of micro-batches, of first passes and of the update, as they ran."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Batch, BatchError, Micro, SampleBatch, tree
from anybatch.engine import Reader
from anybatch.memory import MemoryReading
from anybatch.planner.law import Law, Size
from anybatch.recompute import Offload
from anybatch.state import rng

COLLATED_AT_ONCE = 8  # rows collated together if only shapes are needed
BEYOND = 1.05  # a size this factor larger than all readings is read
_PER_SIZE = 3  # readings of one size
_LENGTHS = 8  # lengths that are read when they first come
_SIZES = 12  # sizes that are read when they first come, however small
_PER_EVENT = 2_600  # bytes that a reading itself uses per allocation
_TOO_DEAR = 0.03  # share of the room by which a reading may exceed it
_SEGMENTS = 22 * 2**20  # bytes of one segment of each pool of CUDA's allocator, which may be nearly empty
_SMALL = 2 * 2**20  # bytes of a segment of its small pool
_PACKED = 1 / 8  # share that tensors of 1 to 10 MB leave empty in its segments of 20 MB; on average 0.115


class Readings:
    """Bytes of the micro-batches of one kind of rows with one choice of blocks, as they were read."""

    def __init__(self) -> None:
        self.law = Law()
        self.whole: dict[Size, float] = {}  # bytes of uncut batches, gradients included
        # of the loss over all rows, by rows of the batch: the peak, and what stays (outputs, their gradient)
        self.first: dict[int, tuple[float, float]] = {}
        self.gradients = 0  # bytes of gradient sums
        self.ran = 0  # rows times length of the largest micro-batch so far
        self.events = 0  # allocations in the last reading
        self.host = 0  # bytes that waited in host memory
        self.is_exact = True  # readings saw all bytes; otherwise an allowance is added
        # Of an allocator with a cache: bytes reserved and not used, by size; their largest share in the bytes
        # of tensors, beyond a segment of each pool; bytes of tensors on the device before a micro-batch.
        self.unused, self.unusable, self.below = dict[Size, int](), 0.0, 0

    @property
    def spare(self) -> int:
        """Bytes of a small segment that the update may leave nearly empty; 0 without a cache."""
        return _SMALL if self.below else 0

    @property
    def seen(self) -> int:
        """Rows times length of the largest micro-batch that was read or went through."""
        return max(self.law.largest, self.ran)

    def first_pass(self, rows: int) -> tuple[float, float]:
        """Return peak and lasting bytes of the loss over so many rows; in proportion if not read."""
        if not self.first or rows in self.first:
            return self.first.get(rows, (0.0, 0.0))
        known = [*self.first][-1]  # the last is the nearest to a real batch
        peak, left = self.first[known]
        return peak * rows / known, left * rows / known

    def fits(self, size: Size, room: float, *, is_uncut: bool = False) -> bool:
        """Return True if a micro-batch fits into so many bytes beside the gradient sums.

        The gradients of an uncut batch are made while activations are freed, so its own reading counts.
        """
        if is_uncut and size in self.whole:
            return self.whole[size] <= room + self.gradients + self.spare
        # Fewer rows than were read may take more bytes: a single one may run other kernels.
        return self.law.least <= size[0] and self.bound(size) <= room

    def expected(self, size: Size) -> float:
        """Return the bytes expected of a micro-batch."""
        return self._reserved(size, self.law(size))

    def bound(self, size: Size) -> float:
        """Return the bytes to allow for."""
        return self._reserved(size, self.law.bound(size))

    def _reserved(self, size: Size, used: float) -> float:
        if size in self.unused or not self.below:
            return used + self.unused.get(size, 0)
        return used + _SEGMENTS + max(_PACKED * used, self.unusable * (self.below + used))

    def add(self, size: Size, num_bytes: float, reading: MemoryReading) -> None:
        """Add the reading of a micro-batch beside gradient sums."""
        used, unused = num_bytes - reading.unused, reading.unused
        self.law.add(size, used)
        if unused:
            self.unused[size] = max(self.unused.get(size, 0), unused)
            self.below = max(self.below, int(reading.allocated - used))
            self.unusable = max(self.unusable, (unused - _SEGMENTS) / reading.allocated)

    def is_new(self, size: Size) -> bool:
        """Return True if a size is to be read when it comes."""
        read = self.law.readings
        if size in read:
            return False
        is_new_length = size[1] not in self.law.lengths and len(self.law.lengths) < _LENGTHS
        return is_new_length or len(read) < _SIZES or size[0] * size[1] > BEYOND * self.law.largest

    def state(self) -> dict[str, Any]:
        """Return the readings as JSON values."""
        return {
            "readings": [[*size, found] for size, found in self.law.readings.items()],
            "whole": [[*size, found] for size, found in self.whole.items()],
            "first": [[rows, *found] for rows, found in self.first.items()],
            "unused": [[*size, found] for size, found in self.unused.items()],
        } | {name: getattr(self, name) for name in _PLAIN}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state`."""
        self.law = Law(((rows, length), found) for rows, length, found in state["readings"])
        self.whole = {(rows, length): found for rows, length, found in state["whole"]}
        self.first = {rows: (peak, left) for rows, peak, left in state["first"]}
        self.unused = {(rows, length): found for rows, length, found in state.get("unused", ())}
        for name in _PLAIN:
            setattr(self, name, state.get(name, 0))


_PLAIN = "gradients", "ran", "events", "host", "is_exact", "unusable", "below"


@dataclass(slots=True)
class _Open:
    """The micro-batch that runs, and its reading."""

    size: Size
    own: int  # bytes of its rows, if they are copies
    held: int  # bytes of gradient sums
    reading: MemoryReading | None


class MemoryReader(Reader):
    """The reader of one step: reads the bytes of some micro-batches."""

    def __init__(
        self,
        readings: Readings,
        devices: Collection[torch.device],
        *,
        room: float = math.inf,
        most: int = 0,
        is_look: bool = False,
        updates: list[float] | None = None,
        rows: int = 0,
        own: int = 0,
    ) -> None:
        self.readings, self.devices = readings, devices
        self._room = room  # bytes for a micro-batch beside the gradient sums
        self._most, self._rows = most, rows  # of the largest micro-batch, which alone is read; of the batch
        self._own = own  # bytes of the batch, which are held throughout
        self._is_look = is_look  # a few rows run, before a step; each size is read twice
        self._updates = updates  # temporary bytes of updates so far; None if this one is not to be read
        self.is_blind = False  # no reading could begin
        self._has_read = False
        self._open: _Open | None = None

    def begin(self, micro: Micro, held: int) -> None:
        """Start a reading, if this micro-batch is to be read."""
        leaves = _leaves(micro.rows)
        size = len(micro.indices), _length(leaves)
        self.readings.gradients = max(self.readings.gradients, held)
        own = sum(one.nbytes for one in leaves if one.untyped_storage().nbytes() == one.nbytes)
        Offload.most = 0
        self._begin(size, own, held, is_read=self._wants(size, held))

    def _begin(self, size: Size, own: int = 0, held: int = 0, *, is_read: bool = True) -> None:
        reading = MemoryReading.begin(self.devices) if is_read else None
        self.is_blind = self.is_blind or (is_read and reading is None)
        self._open = _Open(size, own, held, reading)

    def _wants(self, size: Size, held: int) -> bool:
        read = self.readings
        times = len(read.law.readings.get(size, ()))
        if self._is_look:
            return times < 2 if held else size[0] == self._rows
        expected = read.bound(size) if read.law.readings else 0.0
        is_dear = expected + read.events * _PER_EVENT > (1 + _TOO_DEAR) * self._room
        if self._has_read or is_dear:
            return False
        if not held:  # an uncut batch, or the first micro-batch, which has no gradient sums yet
            return size[0] == self._rows and size not in read.whole
        if size[0] < self._most:
            return False
        return read.is_new(size) or times < _PER_SIZE

    def begin_first(self, rows: int) -> None:
        """Read the loss over all rows, unless that over so many was read."""
        if rows not in self.readings.first:
            self._begin((rows, 0))

    def first_done(self) -> None:
        """Keep the peak of the loss over all rows, and what it leaves."""
        opened, found = self._end()
        if opened and found:
            peak, left = found  # the outputs' gradient; the outputs, as large, were there before
            self.readings.first[opened.size[0]] = float(peak + left), 2.0 * left

    def forward_done(self) -> None:
        """Mark the end of the forward: the graph is complete."""
        if self._open and self._open.reading:
            self._open.reading.mark()

    def done(self) -> None:
        """Add the reading to the law."""
        opened, found = self._end()
        if not opened:
            return
        read = self.readings
        read.ran = max(read.ran, opened.size[0] * opened.size[1])
        if not (opened.reading and found):  # a profiler of the caller's may take over
            return
        self._has_read = not self._is_look
        read.is_exact = read.is_exact and opened.reading.is_exact
        read.events, read.host = opened.reading.events, max(read.host, Offload.most)
        if opened.held:
            read.add(opened.size, found[0] + opened.own, opened.reading)
        else:
            read.whole[opened.size] = found[0] + max(0, opened.own - self._own)

    def begin_update(self) -> None:
        """Read the update, except the first, which makes optimizer state."""
        if self._updates is not None:
            self._begin((0, 0))

    def update_done(self) -> None:
        """Keep the temporary bytes of the update."""
        found = self._end()[1]
        if found and self._updates is not None:
            self._updates.append(found[0] - self.readings.spare)  # the reading saw that one too

    def close(self) -> None:
        """Drop an open reading."""
        self._end()

    def _end(self) -> tuple[_Open | None, tuple[int, int] | None]:
        opened, self._open = self._open, None
        return opened, opened.reading.end() if opened and opened.reading else None


def _leaves(rows: Any) -> Sequence[Tensor]:
    try:  # `collate` may return other objects
        return tree.flatten(rows).leaves
    except BatchError:
        return ()


def _length(leaves: Sequence[Tensor]) -> int:
    return max(1, sum(one.numel() for one in leaves) // leaves[0].shape[0]) if leaves else 1


def length_of(batch: Batch) -> int:
    """Return the numbers in one row of a batch; for samples, in the longest row."""
    if not isinstance(batch, SampleBatch):
        return _length(batch.leaves)
    with suppress(BatchError, ValueError), rng.preserved():  # `collate` may return other kinds of objects
        shapes = [*map(_shapes, batch.cut(COLLATED_AT_ONCE))]  # each is freed before the next is made
        longest = [map(max, zip(*sizes, strict=True)) for sizes in zip(*shapes, strict=True)]
        return max(1, sum(map(math.prod, longest)))
    return 1


def _shapes(rows: object) -> list[torch.Size]:
    return [leaf.shape[1:] for leaf in tree.flatten(rows).leaves]
