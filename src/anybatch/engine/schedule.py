"""The order of the work: which micro-batch comes next, and what is left when one has failed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from anybatch.core import Cut, Micro
from anybatch.engine.accumulate import Accumulator
from anybatch.engine.plan import Plan
from anybatch.state import Snapshot

_SHOWN = 9  # parts of a cut that are written out


class Schedule:
    """Micro-batches one after the other; what is not done comes again, perhaps smaller.

    A loss in which rows meet makes its first pass when the first micro-batch is asked for.

    Attributes:
        is_open: whether the first pass is over.
        scale_before: the loss scale before the micro-batch at hand made it give way.
    """

    def __init__(self, plan: Plan, sums: Accumulator, before: Snapshot) -> None:
        self._sums, self._before = sums, before
        self._stack: ExitStack | None = None  # holds what a first pass sets up
        self._cut = plan.parts
        self._done = 0
        self.is_open = sums.is_in_window or sums.loss.is_plain  # a window has opened its loss
        self.scale_before: dict[str, float] | None = None

    @property
    def left(self) -> Sequence[Sequence[int]]:
        """Row indices of the micro-batches that are still to be done, the one at hand first."""
        return self._cut.parts[self._done :]

    def __iter__(self) -> Iterator[Micro]:
        sums = self._sums
        if not self.is_open:
            self._first_pass()
        left = self.left
        micro_batches = sums.batch.micro_batches(left)
        for _ in left:
            self._before.begin()  # first: to make a micro-batch may draw random numbers, too
            yield next(micro_batches)

    def __enter__(self) -> "Schedule":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)

    def _first_pass(self) -> None:
        sums, task = self._sums, self._sums.task
        self._stack = stack = self._stack or ExitStack()
        with sums.plan.precision.computing(task.kinds):
            along = sums.loss.along(sums.batch, self._cut.sizes, sums.model, self._before.put_modules_back)
            share = stack.enter_context(along)
        sums.share = lambda index: share(index[0], index[-1] + 1)
        self.is_open = True

    def done(self) -> None:
        """The micro-batch at hand is in the sums, or left out: its rows do not come again."""
        self._done += 1
        self.scale_before = None
        self._sums.forget_scale()

    def place(self) -> str:
        """Return the current micro-batch and its rows, for an error."""
        sums = self._sums
        if not self.is_open:
            return "the first pass over the rows of the batch"
        if not self.left:
            return "what follows the last micro-batch"
        rows, sizes = self.left[0], [*sums.rows, *map(len, self.left)]
        single = ""
        if len(rows) == 1 < len(sizes) and not sums.is_in_window:
            shown = sizes if len(sizes) <= _SHOWN else [*sizes[:2], "...", *sizes[-2:]]
            single = f"; the cut {'+'.join(map(str, shown))} leaves one row"
        named = sums.batch.rows_in_words(sums.offset + rows[0], sums.offset + rows[-1] + 1)
        trimmed = ", ".join([f"batch{path}" for path in sums.batch.trimmed])
        cut_off = f', trimmed to its longest row in {trimmed} (order="length")' if trimmed else ""
        return f"micro-batch {sums.count} ({named} of the batch{single}){cut_off}"

    def cut_smaller(self, most: int) -> None:
        """Cut what is left into parts of at most so many rows."""
        left = Cut(tuple(self.left))
        # Parts that were cut by tokens differ in rows, but all need as much memory.
        rest = left.halved() if self._sums.batch.order else left.after(0, most=most)
        self._cut = Cut((*self._cut.parts[: self._done], *rest.parts))
