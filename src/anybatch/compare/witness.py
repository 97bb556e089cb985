"""The witness: the loss of all rows at once, beside that of the micro-batches, both without a graph."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch.compare.covers import Covers, Doubt
from anybatch.compare.look import reached_by, tensors_of
from anybatch.compare.outcome import Looked, Outcome, Split, differ, losses_differ, outcome_of
from anybatch.core import Batch, LossError, OutOfMemoryError, SampleBatch, StepReport, cut_sizes
from anybatch.engine import Plan, Task
from anybatch.memory import MemoryReading, find_device, parse_memory
from anybatch.state import rng

_SHARE = 0.5  # of the free memory that all rows may take where there is no budget
_LEAST = 2  # times the rows of the largest micro-batch


class Witness:
    """The comparison of the loss of all rows with that of the micro-batches, in one update.

    It shows what a few rows cannot: a mean of the 16 largest losses, a router whose capacity depends on the
    rows. Forwards run without a graph, with dropout at its expected value, and all is put back.
    """

    def __init__(self, task: Task, batch: Batch, plan: Plan, room: float | None, covers: Covers) -> None:
        """Take what is compared.

        Args:
            task: model and loss.
            batch: all rows of an update.
            plan: how they are cut.
            room: bytes that forwards may take; None for half of the memory that is free.
            covers: notes whether a later forward gives the same loss.
        """
        self.task, self.batch, self.covers = task, batch, covers
        self.plan = replace(plan, blocks=())  # recomputation changes nothing without a graph
        self._room, self._row_bytes = room, 0.0

    def whole(self) -> Outcome | None:
        """Return the loss of all rows, which the step's own is compared with; None if `refuse` has to.

        That costs one forward instead of two, where forwards draw nothing and move nothing.
        """
        if not self.covers.is_quiet or self._excuse() is not None:
            return None
        try:
            with self._undone() as reached:
                self.covers.is_quiet = self._read_row(reached)
                if not self.covers.is_quiet:
                    return None
                found = self._outcome(self.batch.padded(), self._cut_of_all(), reached)
        except OutOfMemoryError:
            return None
        is_told = isinstance(found, Looked) and found.is_quiet and found.is_weighed and not found.is_random
        return found if isinstance(found, Looked) and is_told else None

    def is_of(self, whole: Outcome, report: StepReport) -> bool:
        """Return True if the loss of a step is that of all rows."""
        terms = whole.report.terms, report.terms
        return not (report.dropped or losses_differ(terms, whole.dtypes, self.batch.rows))

    def refuse(self, held: int) -> Doubt | None:
        """Compare the loss of all rows, at once or in the largest parts that fit, with that of micro-batches.

        Return the reason why nothing can be said, or None.

        Args:
            held: the last update at which the losses were the same; 0 for none.

        Raises:
            LossError: the losses differ by more than rounding.
        """
        if excuse := self._excuse():
            return excuse
        try:
            with self._undone() as reached:
                return self._compare(held, reached)
        except OutOfMemoryError:
            return Doubt("memory ran out in a forward of all rows")

    def _excuse(self) -> Doubt | None:
        task = self.task
        if task.network.batch_norms and self.plan.batch_norm != "frozen":
            return Doubt('batch_norm="micro" takes the statistics of each micro-batch', is_quiet=True)
        if any(map(is_lazy, task.network.everyone)):
            return Doubt("parameters are lazy", is_quiet=True)
        copies = sum(one.nbytes for one in getattr(self.batch, "leaves", ()))
        if self._room is not None and 2 * copies > self._room:  # a forward may write to its rows
            return Doubt("the budget has no room for copies of all rows")
        return None

    @contextmanager
    def _undone(self) -> Generator[Sequence[Tensor]]:
        """Yield the tensors that a forward reaches; put all back."""
        with rng.preserved():
            noted = reached_by(self.task, self.batch)
            try:
                yield tensors_of(noted)
            finally:
                noted.put_back()

    def _outcome(self, batch: Batch, cut: Split, reached: Sequence[Tensor], **options: Any) -> Any:
        return outcome_of(self.task, batch, self.plan, cut, reached=reached, has_graph=False, **options)

    def _cut_of_all(self) -> Split:
        """Return the largest parts that fit: all rows as one, if they may."""
        rows, room = self.batch.rows, self._room
        if room is None:
            room = _SHARE * parse_memory("auto", find_device(next(iter(self.task.network.devices))))
        size = rows if self._row_bytes * rows <= room else int(room / self._row_bytes)
        if min(size, rows) < min(_LEAST * max(self.plan.sizes), rows):
            raise OutOfMemoryError(f"Expected room for {rows} rows at once, got less. Free memory.")
        return Split(tuple(cut_sizes(rows, size)))

    def _cut(self) -> Split:
        """Return the plan's parts; smaller ones of samples, which are collated, copied, and held twice."""
        sizes = self.plan.sizes
        if self._room is not None and isinstance(self.batch, SampleBatch):
            sizes = cut_sizes(self.batch.rows, max(1, max(sizes) // 3))
        return Split(tuple(sizes))

    def _read_row(self, reached: Sequence[Tensor]) -> bool:
        """Read the bytes of a row in one forward of few; return False if it draws or moves what it uses."""
        size = max(self._cut().sizes)
        reading = MemoryReading.begin(self.task.network.devices)
        try:
            found = self._outcome(self.batch.only(range(size)), Split((size,)), reached)
        finally:
            read = reading.end() if reading is not None else None
        self._row_bytes = max(1.0, read[0] / size) if read else math.inf
        return isinstance(found, Looked) and found.is_quiet

    def _compare(self, held: int, reached: Sequence[Tensor]) -> Doubt | None:
        batch, cut = self.batch, self._cut()
        parts = self._outcome(batch, cut, reached)
        if not isinstance(parts, Looked):  # the step itself will tell
            return Doubt(f"the loss without a graph gave {type(parts).__name__}: {parts}", is_quiet=True)
        if not self._row_bytes:
            self._read_row(reached)
        again = partial(
            self._outcome, batch.padded(), reached=reached, is_watched=not parts.is_quiet, like=parts.seen
        )
        whole = again(self._cut_of_all())
        if not isinstance(whole, Looked):
            return Doubt(f"{batch.rows} rows at once gave {type(whole).__name__}: {whole}", is_quiet=True)
        found = differ(whole, parts)
        self.covers.is_quiet = parts.is_quiet and whole.is_quiet and found is None
        if not (whole.is_weighed and parts.is_weighed):
            return Doubt("no row has weight", is_quiet=True)
        if found is None:
            return None
        same = again(whole.cut)
        if whole.is_random or parts.is_random or not isinstance(same, Looked) or differ(whole, same):
            return Doubt("the same rows give another loss the second time", is_quiet=True)
        halves = [
            self._outcome(self.batch.only(one), Split((len(one),)), reached) for one in _halves(batch.rows)
        ]
        found = differ(whole, parts, *[one for one in halves if isinstance(one, Looked)])
        if found is None:  # rows that cancel in the sum
            return None
        if found.is_small:
            return Doubt(f"the losses of all rows and of micro-batches are {found.words}, near rounding")
        since = f"It was the same at update {held}. " if held else ""
        raise LossError(
            f"Expected the same loss from {batch.rows} rows as {_told(whole.cut)} and as {_told(cut)}, got "
            f"{found.words}. {since}Rows affect each other, in the loss or in the model: see ab.WholeBatch. "
            "No update was made; ab.check(model, loss, batch) names the place, Options(check=False) skips "
            "this."
        )


def _halves(rows: int) -> tuple[range, range]:
    return range(rows // 2), range(rows // 2, rows)


def _told(cut: Split) -> str:
    """Return the rows of each part, shortened."""
    sizes = cut.sizes
    return str(cut) if len(sizes) <= 4 else f"{sizes[0]}+{sizes[1]}+...+{sizes[-1]}"
