"""Cuts within a budget chosen from readings: memory and speed of earlier micro-batches."""

import math
import statistics
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.core import (
    Batch,
    BatchError,
    BudgetError,
    Micro,
    SampleBatch,
    counted,
    cut_sizes,
    format_bytes,
    torch_private as private,
    tree,
)
from anybatch.engine import Reader, Task
from anybatch.losses import WholeBatch
from anybatch.memory import MemoryReading
from anybatch.planner.law import Law, Size
from anybatch.planner.shapes import longest
from anybatch.planner.trace import is_one_pass

FROZEN = 3  # steps after which a model that draws random numbers keeps its cut
_EARLY = 8  # steps in which micro-batches are read or raced; later at every power of two
_PER_SIZE = 3  # readings of one size
_LOOKS = 3  # looks without a reading, as with a wrong batch, before readings are given up
_LENGTHS = 8  # lengths that are read when they first come
_BEYOND = 1.05  # a size this factor larger than all readings is read
_GROWTH, _NEAR, _NEAR_GROWTH = 4, 0.6, 2  # largest growth beyond the readings; less near the budget
_PROPORTION = 0.25  # share of the room that rows may use if their bytes are proportional to rows
_PER_EVENT = 2_600  # bytes that a reading itself uses per allocation
_TOO_DEAR = 0.03  # share of the room by which a reading may exceed it
_PAIRS, _GAIN, _HALVINGS = 3, 0.97, 2  # a race: comparisons, least gain, most halvings


class Measured(Reader):
    """The largest even cut within a budget, by a law of bytes fitted to real micro-batches.

    The law starts with readings of the few rows that are compared before the first cut. In the first steps,
    and rarely afterwards, a micro-batch is read again. With `races`, half of the micro-batch is tried in the
    same steps and taken if it is at least 3 % faster, for at most 8 steps. If the forward draws random
    numbers, nothing is raced, and the cut stays the same from the third step on.
    """

    def __init__(self, num_bytes: int, *, races: bool) -> None:
        self.num_bytes = num_bytes
        self.law = Law()
        self.whole: dict[Size, float] = {}  # bytes of uncut batches, gradients included
        self.update = 0.0  # temporary bytes of the update
        self.gradients = self.steps = self.level = 0  # bytes of gradient sums; halvings won by races
        self.is_exact = True  # readings saw all bytes; otherwise an allowance is added
        self.is_random = self.is_looking = False  # the forward draws random numbers
        self.is_settled = not races
        self.refused = ""  # the reason why the batch must not be cut
        self.is_refused = False  # readings are impossible, so the step has to be traced
        self.is_wanted = False  # micro-batches of the next step are to be read or timed
        self._looks = 0
        self._static: tuple[Task | None, int, int] = None, 0, 0
        self._ratios: list[float] = []
        self._alone: tuple[int, float] | None = None  # length, and seconds per row of an uncut step
        self._trial: tuple[int, int] | None = None  # rows that are raced in this step, and half of them
        self._times: list[tuple[Size, float]] = []
        self._index = 0  # index of the micro-batch in this step
        self._has_read = self._is_uncut = False
        self.events = 0  # allocations in the last reading
        self.ran = 0  # rows times length of the largest micro-batch so far
        self._room = 0
        self._reading: MemoryReading | None = None
        self._now: Size = (0, 0)
        self._own = self._held = 0
        self._began = 0.0
        self._sizes: dict[tuple[int, int, int, int | None, bool], tuple[int, ...]] = {}
        self.devices: Collection[torch.device] = ()

    @contextmanager
    def looking(self, static: int, length: int) -> Generator[Callable[[int], bool]]:
        """Read a few rows inside; yield a function that tells if so many rows of this length fit."""
        self.is_looking = True
        try:
            yield (
                lambda rows: (
                    bool(self.law.readings)
                    and self._fits((rows, length), self.num_bytes - static - self.gradients)
                )
            )
        finally:
            self.is_looking = False
            self._looks += 1
            self.is_refused = not self.law.readings and self._looks >= _LOOKS

    def static_bytes(self, task: Task, batch: Batch) -> int:
        """Return the bytes alive throughout a step, without its gradient sums."""
        states = sum(len(one.state) for one in task.optimizers)
        if self._static[:2] != (task, states) or self.steps < FROZEN:
            self._static = task, states, _static_bytes(task)
        found = [
            p.grad for p in task.network.everyone if p.grad is not None and p.grad.layout is torch.strided
        ]
        # Existing gradients are kept and added to the step's, hence twice.
        return self._static[2] + sum(one.nbytes for one in (*getattr(batch, "leaves", ()), *found, *found))

    def sizes(
        self, rows: int, length: int, static: int, *, only: int | None = None, in_window: bool = False
    ) -> tuple[int, ...]:
        """Return the rows of each micro-batch of a batch; empty if not even the smallest is known to fit.

        `length` is the numbers in a row, `static` the bytes alive throughout without gradient sums, `only`
        the one allowed size. In a window the rows stay together if they are expected to fit, without limit on
        growth.
        """
        self._trial, self._index, self._has_read, self._times = None, 0, False, []
        if not self.law.readings:
            return ()
        key = rows, length, static, only, in_window
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = self._fitting(*key)
        if in_window:
            return found
        if found and only is None and self.steps and not (self.is_settled or self.is_random):
            found = self._raced(rows, max(found))
        self.is_wanted, self._is_uncut = self._wants(found, length), found == (rows,)
        return found

    def _fitting(
        self, rows: int, length: int, static: int, only: int | None, in_window: bool
    ) -> tuple[int, ...]:
        room = self._room = self.num_bytes - static - self.gradients
        if self.update > room:
            return ()
        if only is not None:
            return tuple(cut_sizes(rows, only)) if self._fits((min(only, rows), length), room) else ()
        top = next((size for size in _largest_first(rows) if self._fits((size, length), room)), 0)
        if not top or in_window:
            return even(rows, -(-rows // top)) if top else ()
        is_near = len(self.law.readings) < 2 or self.law((top, length)) > _NEAR * room
        seen = max(self.law.largest, self.ran) // length
        if top > _BEYOND * seen and not self._is_frozen:
            sure = int(_PROPORTION * room / self.law((max(1, seen), length)) * seen)
            top = min(top, max(2, sure, seen * (_NEAR_GROWTH if is_near else _GROWTH)))
        return even(rows, -(-rows // max(1, top >> self.level)))

    def too_small(self, rows: int, length: int, static: int) -> BudgetError:
        """Return the error for a budget below the smallest micro-batch of a step that cannot be traced."""
        held, size = static + self.gradients, (rows, length)
        least = held + math.ceil(max(self.update, self.law.bound(size)))
        return BudgetError(
            f"Expected room for {counted(rows, 'row')} at a time, got {format_bytes(self.num_bytes)}. "
            f"By readings this takes {format_bytes(self.law(size))} on top of {format_bytes(held)} of "
            "weights, gradients, optimizer state and batch, and a cheaper plan would need a step that can be "
            f"traced. Pass a larger memory=, about {format_bytes(least)} ({least} bytes).",
            smallest=least,
        )

    def _fits(self, size: Size, room: float) -> bool:
        if self.whole.get(size, float("inf")) <= room + self.gradients:
            return True  # uncut: gradients are made while activations are freed
        return self.law.bound(size) <= room

    def _raced(self, rows: int, top: int) -> tuple[int, ...]:
        """Race the largest micro-batch against its half: in one step, or in turn if the batch is uncut."""
        half = -(-top // 2)
        if half == top:
            return even(rows, -(-rows // top))
        self._trial = top, half
        if rows >= 2 * top:
            large = max(1, rows // top // 2) * top
            return (*even(large, large // top), *even(rows - large, -(-(rows - large) // half)))
        return (rows,) if self._alone is None and top == rows else even(rows, -(-rows // half))

    @property
    def _is_frozen(self) -> bool:
        return self.is_random and self.steps >= FROZEN

    def _wants(self, sizes: Sequence[int], length: int) -> bool:
        if self._is_frozen or not sizes:
            return False
        is_early = self.steps < _EARLY or self.steps & (self.steps - 1) == 0
        return is_early or self._trial is not None or self._is_new((max(sizes), length))

    def _is_new(self, size: Size) -> bool:
        known = self.law.lengths
        is_longer = size[1] not in known and len(known) < _LENGTHS
        return size not in self.law.readings and (is_longer or size[0] * size[1] > _BEYOND * self.law.largest)

    def finish(self, *, is_random: bool) -> None:
        """End a step: judge a race, and settle after the first steps."""
        self.steps, self.is_random = self.steps + 1, self.is_random or is_random
        if self._trial is not None:
            self._judge(*self._trial)
        self.is_settled = self.is_settled or self.steps >= _EARLY

    def _judge(self, top: int, half: int) -> None:
        per_row = {size: self._seconds_per_row(size) for size in (top, half)}
        large, small = per_row[top], per_row[half]
        length = self._now[1]
        if small and large:
            self._ratios.append(small / large)
        elif large:
            self._alone = length, large
        elif small and self._alone is not None:
            if self._alone[0] == length:
                self._ratios.append(small / self._alone[1])
            self._alone = None
        if len(self._ratios) == _PAIRS:
            is_faster = statistics.median(self._ratios) < _GAIN and max(self._ratios) < 1
            self.level, self._ratios = self.level + is_faster, []
            self.is_settled = not is_faster or self.level == _HALVINGS
            self._sizes.clear()

    def _seconds_per_row(self, rows: int) -> float | None:
        times = self._times[1:] if len(self._times) > 2 else self._times  # the first makes the gradients
        return min([seconds / size[0] for size, seconds in times if size[0] == rows], default=None)

    def begin(self, micro: Micro, held: int) -> None:
        """Start a reading, or a timing."""
        leaves = _leaves(micro.rows)
        self._now = len(micro.indices), _length(leaves)
        self.gradients, self._held = max(self.gradients, held), held
        self._own = sum(one.nbytes for one in leaves if one.untyped_storage().nbytes() == one.nbytes)
        if self._wants_reading(held):
            self._reading = MemoryReading.begin(self.devices)
        self._began = perf_counter()

    def _wants_reading(self, held: int) -> bool:
        if self.is_looking:
            return held > 0 and len(self.law.readings.get(self._now, ())) < 2
        is_dear = self.law.bound(self._now) + self.events * _PER_EVENT > (1 + _TOO_DEAR) * self._room
        if self._has_read or is_dear:
            return False
        if not held:  # an uncut batch, or the first micro-batch, which has no gradient sums yet
            return self._is_uncut and self._now not in self.whole
        if self._is_new(self._now):
            return True
        return (
            self._trial is None and self._index == 1 and len(self.law.readings.get(self._now, ())) < _PER_SIZE
        )

    def forward_done(self) -> None:
        """Mark the end of the forward: the graph is complete."""
        if self._reading is not None:
            self._reading.mark()

    def done(self) -> None:
        """Add the reading to the law."""
        reading, self._reading = self._reading, None
        seconds = perf_counter() - self._began
        self._index += 1
        if self._now[0] * self._now[1] > self.ran:
            self.ran = self._now[0] * self._now[1]
            self._sizes.clear()
        if reading is None:
            self._times.append((self._now, seconds))
            return
        found = reading.end()
        if found is None:  # a profiler of the caller's took over
            return
        num_bytes = found[0] + self._own
        self._has_read = not self.is_looking
        self.is_exact = self.is_exact and reading.is_exact
        self.events = reading.events
        if self._held:
            self.law.add(self._now, num_bytes)
        else:
            self.whole[self._now] = num_bytes
        self._sizes.clear()

    def begin_update(self) -> None:
        """Read the update, except the first, which makes optimizer state."""
        if 0 < self.steps <= 2 and not self._is_frozen:
            self._reading = MemoryReading.begin(self.devices)

    def update_done(self) -> None:
        """Keep the temporary bytes of the update."""
        if self._reading is not None:
            found, self._reading = self._reading.end(), None
            self.update = max(self.update, found[0] if found else 0)
            self._sizes.clear()

    def close(self) -> None:
        """Drop an open reading."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    @property
    def note(self) -> str:
        """The basis of the cut, for a report."""
        count = sum(map(len, self.law.readings.values())) + len(self.whole)
        allowed = "" if self.is_exact else ", with an allowance for what readings cannot see here"
        faster = f"; 1/{2**self.level} of what fits was faster" if self.level else ""
        return f"cut by memory that was read in {count} runs of micro-batches{allowed}{faster}"

    def state(self) -> dict[str, Any]:
        """Return readings and settings as JSON values."""
        return {
            "readings": [[*size, found] for size, found in self.law.readings.items()],
            "whole": [[*size, found] for size, found in self.whole.items()],
        } | {name: getattr(self, name) for name in _PLAIN}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state`."""
        self.law = Law(((rows, length), found) for rows, length, found in state["readings"])
        self.whole = {(rows, length): found for rows, length, found in state["whole"]}
        for name in _PLAIN:
            setattr(self, name, state[name])
        self._sizes.clear()


_PLAIN = (
    "num_bytes",
    "update",
    "gradients",
    "steps",
    "level",
    "ran",
    "events",
    "is_random",
    "is_settled",
    "is_exact",
)


def even(rows: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of so many parts that differ by at most one row, the larger first."""
    size, more = divmod(rows, min(rows, parts))
    return (size + 1,) * more + (size,) * (min(rows, parts) - more)


def _largest_first(rows: int) -> list[int]:
    return [*dict.fromkeys(-(-rows // parts) for parts in range(1, rows + 1))]


def _leaves(rows: Any) -> Sequence[Tensor]:
    try:  # `collate` may return other objects
        return tree.flatten(rows).leaves
    except BatchError:
        return ()


def _length(leaves: Sequence[Tensor]) -> int:
    return max(1, sum(one.numel() for one in leaves) // leaves[0].shape[0]) if leaves else 1


def length_of(batch: Batch) -> int:
    """Return the numbers in one row of a batch; for samples, in the longest row."""
    if isinstance(batch, SampleBatch):
        with suppress(BatchError):
            return max(1, sum(math.prod(sizes) for _, sizes in longest(batch)))
    return _length(getattr(batch, "leaves", ()))


def may_be_read(task: Task) -> bool:
    """Return True if readings of micro-batches suffice to predict the memory of a step."""
    unread = any(
        isinstance(one, LazyModuleMixin) or getattr(one, "sparse", False) for one in task.network.modules
    )
    is_read = isinstance(task.loss, WholeBatch) or is_one_pass(task.loss, task.model)
    return is_read and not unread and len(task.network.devices) == 1


def _static_bytes(task: Task) -> int:
    held: list[Any] = [*task.network.everyone, *task.masters.tensors]
    for module in task.network.modules:
        held += [*private.buffers_of(module).values()]
    for optimizer in task.optimizers:
        held += private.pytree.tree_leaves([*optimizer.state.values()])
    found = [one for one in held if isinstance(one, Tensor) and one.layout is torch.strided]
    here = [one.untyped_storage() for one in found if one.device in task.network.devices]
    return sum({one.data_ptr(): one.nbytes() for one in here}.values())
