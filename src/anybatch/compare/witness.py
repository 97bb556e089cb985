"""The witness: the loss of all rows at once, beside that of the micro-batches, both without a graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from anybatch.compare.covers import Covers, Doubt
from anybatch.compare.look import bench, excuse_of, only, tensors_of
from anybatch.compare.outcome import Looked, Outcome, Split, losses_differ, outcome_of
from anybatch.core import Batch, LossError, OutOfMemoryError, StepReport, cut_sizes
from anybatch.engine import Plan, Task
from anybatch.integrations import homes, wants_router_loss
from anybatch.losses import ModelTerms, WholeBatch
from anybatch.memory import MemoryReading

_Run = Callable[..., Any]
_SMALL = 2**21  # bytes that rows may take without a budget, however little a micro-batch takes


class Witness:
    """The comparison of the loss of all rows with that of the micro-batches, in one update.

    It shows what a few rows cannot: a mean of the 16 largest losses, a router whose capacity depends on the
    rows. Forwards run without a graph, with dropout at its expected value, and all is put back.
    """

    def __init__(self, task: Task, batch: Batch, plan: Plan, room: float | None, covers: Covers) -> None:
        """Take all rows and their plan; without `room`, forwards may take what a micro-batch takes."""
        self.task, self.batch, self.covers = task, batch, covers
        self.plan = replace(plan, blocks=())  # recomputation changes nothing without a graph
        self._room, self._size = room, max(plan.sizes)
        self._least = min(2 * self._size, batch.rows)  # rows of a part that another cut is compared with
        self._is_own = isinstance(task.loss, ModelTerms)

    def whole(self) -> Outcome | None:
        """Return the loss of all rows, which the step's own is compared with; None if `refuse` has to.

        That costs one forward instead of two, where forwards draw nothing and move nothing.
        """
        if not self.covers.is_quiet or excuse_of(self.task, self.plan):
            return None
        with suppress(OutOfMemoryError), bench(self.task, self.batch, self.batch.rows) as (_, noted):
            reached = tensors_of(noted)
            most = self._most(reached)
            if self.covers.is_quiet and most >= (self.batch.rows if self._is_own else self._least):
                found = self._run(reached, self.batch.padded(), cut_sizes(self.batch.rows, most))
                if isinstance(found, Looked) and found.is_quiet and found.is_weighed and not found.is_random:
                    return found
        return None

    def refuse(self, whole: Outcome | None = None, report: StepReport | None = None) -> Doubt | None:
        """Compare the loss of parts of all rows with that of their micro-batches, which draw the same.

        That is left out if the loss of all rows is the `report`'s. Return the reason why nothing can be said.

        Raises:
            LossError: the losses differ by more than rounding.
        """
        if (
            whole
            and report
            and not (report.dropped or losses_differ([whole.report, report], whole.dtypes, self.batch.rows))
        ):
            return None
        if excuse := excuse_of(self.task, self.plan):
            return excuse
        try:
            with bench(self.task, self.batch, self.batch.rows) as (_, noted):
                return self._compare(tensors_of(noted))
        except OutOfMemoryError:
            return Doubt("memory ran out in a forward of all rows")

    def _run(self, reached: Sequence[Tensor], batch: Batch, sizes: Sequence[int], **options: Any) -> Any:
        options = {"has_graph": False, **options}
        return outcome_of(self.task, batch, self.plan, Split(tuple(sizes)), reached=reached, **options)

    def _most(self, reached: Sequence[Tensor], *, has_graph: bool = False) -> int:
        """Return the rows that take what a micro-batch of the step takes with its graph."""
        read, size = self.covers.bytes_of, self._size
        for way in (False, True) if self._room is None else (has_graph,):
            if (size, way) not in read:
                reading = MemoryReading.begin(self.task.network.devices)
                try:
                    few = only(self.task, self.batch, range(size))
                    found = self._run(reached, few, (size,), has_graph=way)
                finally:
                    taken = reading and reading.end()
                read[size, way] = taken[0] if taken else 0
                if isinstance(found, Looked) and not found.is_quiet:
                    self.covers.is_quiet = False
        room = max(_SMALL, read[size, True]) if self._room is None else self._room
        taken = read[size, has_graph]
        most = int(room * size / taken) if taken else 0
        # Without a budget two micro-batches run in any case: mostly without a graph, which takes little more.
        return min(self.batch.rows, most if self._room is not None else max(most, self._least))

    def _groups(self, most: int) -> Iterator[tuple[range, Sequence[int]]]:
        """Yield rows of several micro-batches, at most so many, and the sizes of these."""
        start, sizes = 0, list[int]()
        for size in (*self.plan.sizes, self.batch.rows):
            if sum(sizes) + size > most:
                rows = range(start, start + sum(sizes))
                if len(sizes) > 1:
                    yield rows, sizes
                start, sizes = rows.stop, []
            sizes.append(size)

    def _compare(self, reached: Sequence[Tensor], *, has_graph: bool = False, least: int = 0) -> Doubt | None:
        most = max(least, self._most(reached, has_graph=has_graph))
        if most < self._least:
            return Doubt("only the rows of one micro-batch fit at once")
        run = partial(self._run, reached)
        model = self.task.model
        # Without a graph a model's router loss is left out of parts.
        has_router = self._is_own and bool(homes(model)) and wants_router_loss(model)
        is_mixed = isinstance(self.task.loss, WholeBatch)
        groups = [(range(self.batch.rows), self.plan.sizes)] if is_mixed else self._groups(most)
        doubt, is_quiet = Doubt("no two micro-batches fit at once"), True
        for rows, sizes in groups:
            batch = self.batch if len(rows) == self.batch.rows else self.batch.only(rows)
            whole = run(batch.padded(), cut_sizes(len(rows), most), has_graph=has_graph)
            if not isinstance(whole, Looked):
                if not (has_graph or isinstance(whole, LossError)):  # it may differentiate inside
                    return self._compare(reached, has_graph=True)
                return Doubt(f"{len(rows)} rows at once gave {type(whole).__name__}: {whole}")
            again = {"is_watched": not whole.is_quiet, "like": whole.seen}
            parts = run(batch, sizes, has_graph=has_graph or has_router, **again)
            if not isinstance(parts, Looked):  # the step itself will tell
                return Doubt(f"the loss in parts gave {type(parts).__name__}: {parts}", is_quiet=True)
            if parts.effects.draws_process:
                return Doubt("it draws numbers of Python or NumPy, which cannot be drawn again by rows")
            is_quiet &= whole.is_quiet
            if not (whole.is_weighed and parts.is_weighed):
                doubt = doubt and Doubt("no row has weight", is_quiet=True)
                continue
            differ = partial(losses_differ, dtypes=whole.dtypes | parts.dtypes, rows=len(rows))
            doubt = None
            if differ([whole.report, parts.report]):
                if self._is_own and not has_graph:  # it may do more where gradients are enabled
                    return self._compare(reached, has_graph=True, least=self._least)
                doubt = self._doubt(whole, parts, batch, partial(run, has_graph=has_graph), differ)
                break
        self.covers.is_quiet = is_quiet and doubt is None
        return doubt

    def _doubt(self, whole: Looked, parts: Looked, batch: Batch, run: _Run, differ: _Run) -> Doubt | None:
        """Return the reason why a difference of losses tells nothing, None for rounding; or refuse."""
        same = run(batch.padded(), whole.cut.sizes, like=whole.seen)
        is_random = whole.is_random or parts.is_random or not isinstance(same, Looked)
        if is_random or differ([whole.report, same.report]):
            return Doubt("the same rows give another loss the second time", is_quiet=True)
        half = batch.rows // 2
        parted = [only(self.task, batch, one) for one in (range(half), range(half, batch.rows))]
        halves = [run(one, (one.rows,)) for one in parted]
        found = differ(
            [whole.report, parts.report, *[one.report for one in halves if isinstance(one, Looked)]]
        )
        if found is None:  # rows that cancel in the sum
            return None
        if found.is_small:
            return Doubt(f"the losses of all rows and of micro-batches are {found.words}, near rounding")
        held = self.task.progress.compared
        since = f"It was the same at update {held}. " if held else ""
        raise LossError(
            f"Expected the same loss from {batch.rows} rows as {whole.cut} and as {parts.cut}, "
            f"got {found.words}. {since}Rows affect each other, in the loss or in the model: see "
            "ab.WholeBatch. No update was made; ab.check(model, loss, batch) names the place, "
            "Options(check=False) skips this."
        )
