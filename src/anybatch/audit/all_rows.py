"""The loss of all rows, compared with that of the micro-batches after them, before anything is written"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anybatch.audit import say
from anybatch.audit.few_rows import DRAWS, excuse_of
from anybatch.audit.known import Doubt, KnownKind
from anybatch.audit.outputs import Heard, joined, returning
from anybatch.core import Batch, LossError, OutOfMemoryError, StepReport, cut_sizes
from anybatch.engine import Plan, Task
from anybatch.integrations import homes, wants_router_loss
from anybatch.losses import ModelTerms, SummedLoss, WholeBatch
from anybatch.trial import Bench, Looked, Split, bench, losses_differ, outcome_of

_SMALL = 2**21  # bytes that rows may take without a budget, however little a micro-batch takes
_HELD = 4  # largest results that a forward without a graph holds at once; copies of outputs that a loss holds


class AllRows:
    """The comparison of the loss of all rows with that of the micro-batches, in one update.

    It shows what a few rows cannot: a mean of the 16 largest losses, a router whose capacity depends on the
    rows. As a context it hears the outputs of the step's micro-batches; over these, joined, the loss is
    computed once. The model runs on as many rows as fit, at least on two micro-batches, without a graph, with
    dropout at its expected value; all is put back.
    """

    def __init__(
        self, task: Task, plan: Plan, kind: KnownKind, room: float | None, batch: Batch | None = None
    ) -> None:
        """Take the plan; without `room`, forwards may take what a micro-batch takes."""
        self.task, self.kind, self._batch, self._has_budget = task, kind, batch, room is not None
        self.plan = replace(plan, blocks=())  # recomputation changes nothing without a graph
        sums = sum(one.nbytes for one in task.network.parameters)  # there at the end of the step
        self._room = _SMALL if room is None else room - sums
        self._is_own, self._forward = isinstance(task.loss, ModelTerms), kind.forward
        self.calls, axes = Heard(), kind.forward.axes
        if axes is not None and not isinstance(task.loss, WholeBatch):
            # What backward may need is an upper bound: half of it is surely there.
            fits = max(self._room, kind.forward.kept * plan.micro_batch / 2) if room is None else self._room
            self.calls = Heard(fits / _HELD).listen(task.model)

    def __enter__(self) -> "AllRows":
        if self._batch is not None:
            self.task.progress.judge = partial(self.judge, self._batch)
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.stop()
        self.task.progress.judge = None

    def judge(self, batch: Batch, sizes: Sequence[int], report: StepReport | None = None) -> None:
        """Compare, and note what is known now.

        Raises:
            LossError: the losses differ by more than rounding.
        """
        progress, kind = self.task.progress, self.kind
        self.calls.stop()
        doubt = DRAWS if kind.doubt is DRAWS else excuse_of(self.task, self.plan)
        if doubt is None:
            self.plan = replace(self.plan, rows=batch.rows, micro_batch=max(sizes), cut=tuple(sizes))
            try:
                with bench(self.task, batch) as made:
                    outputs, is_joined = self._outputs(sizes), False
                    if (made.rows.draws or made.rows.order) and self._most(
                        sizes, has_graph=False
                    ) < batch.rows:
                        outputs = []  # all rows would be put together anew
                    if not isinstance(self.task.loss, SummedLoss):
                        is_joined, doubt = self._join(made, sizes, outputs, report)
                    known = None if is_joined or not report or report.dropped else report
                    doubt = doubt or self._run(made, sizes, outputs, known, is_joined=is_joined)
                    doubt = doubt or (_OF_PROCESS if self._forward.draws_process else None)
            except OutOfMemoryError:
                doubt = Doubt("memory ran out in a forward of all rows")
        kind.doubt_of_all = doubt
        if doubt is None:
            progress.compared = kind.at_all = progress.begun
        elif not (doubt.is_quiet or progress.unchecked):
            progress.unchecked = doubt.reason

    def _outputs(self, sizes: Sequence[int]) -> list[list[Any]]:
        """Return the outputs of each micro-batch, if all were heard and none ran twice or was left out."""
        axes, heard = self._forward.axes, self.calls
        if not axes or heard.is_full or heard.count != len(axes) * len(sizes):
            return []
        return heard.parts(len(axes))

    def _returned(self, few: Bench, outputs: Sequence[Sequence[Any]], **options: Any) -> "Looked | None":
        """Return the outcome of rows as one part, whose outputs are known; None if there is none."""
        whole = joined(outputs, self._forward.axes or ())
        if whole is None:
            return None
        with returning(self.task.model, whole):  # copies of all rows might not fit
            found = self._outcome(few, [few.rows.rows], has_copies=False, **options)
        return found if isinstance(found, Looked) else None

    def _join(
        self, made: Bench, sizes: Sequence[int], outputs: list[list[Any]], report: StepReport | None
    ) -> tuple[bool, Doubt | None]:
        """Compare the loss over joined outputs with that of the step.

        Return True if that could be done, and the reason why it told nothing.
        """
        whole = self._returned(made, outputs) if outputs and report and not report.dropped else None
        # Numbers that the loss draws itself are others in its parts.
        if whole is None or report is None or whole.draws_process or not whole.is_quiet:
            return False, None
        has_graph = bool(losses_differ([whole.report, report], whole.dtypes, made.rows.rows))
        if not has_graph:
            return True, None
        whole = self._returned(made, outputs, has_graph=True)  # it may do more where gradients are enabled
        if whole is None:
            return False, None
        middle = len(sizes) // 2
        rows = sum(sizes[:middle])

        def halves() -> list[Looked | None]:
            one, other = _only(made, range(rows)), _only(made, range(rows, made.rows.rows))
            return [self._returned(one, outputs[:middle]), self._returned(other, outputs[middle:])]

        same = partial(self._returned, made, outputs, has_graph=True)
        return True, self._judged(made, sizes, whole, report, whole.dtypes, same, halves)

    def _run(
        self,
        made: Bench,
        sizes: Sequence[int],
        outputs: list[list[Any]],
        report: StepReport | None,
        *,
        is_joined: bool,
    ) -> Doubt | None:
        """Compare the loss of many rows at once with that of their micro-batches.

        That is all rows in groups as large as fit; where the loss is known to add up one group in turn, every
        second time. Outputs that were heard stand for forwards that draw nothing.
        """
        is_known = is_joined or isinstance(self.task.loss, SummedLoss)
        self._forward.count += 1
        if is_known and (self._has_budget or self._forward.draws or not self._forward.count % 2):
            return None  # the few rows, with their draws, have shown what the model does
        if not self._forward.largest:  # no few rows ran, as within a budget
            probe = self._outcome(_only(made, range(max(sizes))), [max(sizes)])
            self._forward.largest = probe.seen.largest / max(sizes) if isinstance(probe, Looked) else 0.0
        for has_graph in (False, True):
            groups = [*self._groups(made, sizes, has_graph=has_graph)]
            if not groups:
                return None if is_known else Doubt("only the rows of one micro-batch fit at once")
            if is_known:
                groups = [groups[self._forward.count // 2 % len(groups)]]
            doubts = list[Doubt | None]()
            for at, few, parts in groups:
                known = outputs[at : at + len(parts)] if is_known and self._forward.is_quiet else []
                told = report if self._forward.is_quiet and few is made else None
                doubts.append(self._compare(few, parts, known, told, has_graph=has_graph))
                if doubts[-1] not in (None, _NO_WEIGHT):
                    break
            if doubts[-1] is not _NEEDS_GRAPH:
                return None if doubts[-1] is _NO_WEIGHT and None in doubts else doubts[-1]
        return _NEEDS_GRAPH

    def _most(self, sizes: Sequence[int], *, has_graph: bool) -> int:
        """Return the rows that may run at once."""
        kept = self._forward.kept * (1 if has_graph else 0.5)  # an upper bound of what backward needs
        room = self._room if self._has_budget else max(self._room, kept * max(sizes))
        each = self._forward.kept if has_graph else _HELD * self._forward.largest
        most = int(room / each) if each else 0
        # Without a budget two micro-batches run in any case: mostly without a graph.
        return most if self._has_budget else max(most, 2 * max(sizes))

    def _groups(
        self, made: Bench, sizes: Sequence[int], *, has_graph: bool
    ) -> Iterator[tuple[int, Bench, Sequence[int]]]:
        """Yield the first of several micro-batches, their rows, as many as fit, and their sizes."""
        most = self._most(sizes, has_graph=has_graph)
        if isinstance(self.task.loss, WholeBatch):
            yield from [(0, made, sizes)] * (most >= 2 * max(sizes))
            return
        start, group = 0, list[int]()
        for at, size in enumerate((*sizes, made.rows.rows + most)):
            if sum(group) + size > most:
                if len(group) > 1:
                    yield at - len(group), _only(made, range(start, start + sum(group))), group
                start, group = start + sum(group), []
            group.append(size)

    def _compare(
        self,
        few: Bench,
        sizes: Sequence[int],
        outputs: Sequence[Sequence[Any]],
        report: StepReport | None,
        *,
        has_graph: bool,
    ) -> Doubt | None:
        rows, model = few.rows.rows, self.task.model

        def run(of: Bench, **options: Any) -> "Looked | Exception":
            padded = of._replace(rows=of.rows.padded())
            most = of.rows.rows
            if isinstance(self.task.loss, WholeBatch):  # which has all outputs in any cut
                most = min(most, self._most(sizes, has_graph=has_graph))
            return self._outcome(padded, cut_sizes(of.rows.rows, most), has_graph=has_graph, **options)

        whole = run(few, is_watched=not self._forward.is_quiet)
        if not isinstance(whole, Looked):
            if not (has_graph or isinstance(whole, LossError)):  # it may differentiate inside
                return _NEEDS_GRAPH
            return Doubt(f"{rows} rows at once gave {type(whole).__name__}: {whole}")
        dtypes = whole.dtypes | self._forward.dtypes
        if report and whole.is_quiet and not losses_differ([whole.report, report], dtypes, rows):
            return None
        # Without a graph a model's router loss is left out of parts.
        has_router = self._is_own and bool(homes(model)) and wants_router_loss(model)
        again = {"like": whole.seen, "is_watched": not whole.is_quiet}
        options = {"has_graph": has_graph or has_router, **again}
        parts: Any = self._returned(few, outputs, **options) if outputs else None
        if parts is None and not (self._is_own or isinstance(self.task.loss, WholeBatch)):
            parts = self._outcome(few, [rows - min(sizes), min(sizes)], **options)  # these tell as much
        if not isinstance(parts, Looked):  # a loss may refuse the other
            parts = self._outcome(few, sizes, **options)
        if not isinstance(parts, Looked):  # the step itself will tell
            return Doubt(f"the loss in parts gave {type(parts).__name__}: {parts}", is_quiet=True)
        if parts.draws_process:
            return _OF_PROCESS
        if not (whole.is_weighed and parts.is_weighed):
            return _NO_WEIGHT
        dtypes |= parts.dtypes
        if self._is_own and not has_graph and losses_differ([whole.report, parts.report], dtypes, rows):
            return _NEEDS_GRAPH  # it may do more where gradients are enabled
        if whole.is_random or parts.is_random:
            return None if losses_differ([whole.report, parts.report], dtypes, rows) is None else _RANDOM
        halves = [_only(few, half) for half in (range(rows // 2), range(rows // 2, rows))]
        same = partial(run, few, like=whole.seen)
        return self._judged(
            few,
            sizes if outputs else parts.cut.sizes,
            whole,
            parts.report,
            dtypes,
            same,
            partial(map, run, halves),
        )

    def _outcome(self, few: Bench, sizes: Sequence[int], **options: Any) -> "Looked | Exception":
        return outcome_of(few, self.plan, Split(tuple(sizes)), **{"has_graph": False, **options})

    def _judged(
        self,
        few: Bench,
        sizes: Sequence[int],
        whole: Looked,
        report: StepReport,
        dtypes: set[torch.dtype],
        same: Callable[[], "Looked | Exception | None"],
        halves: Callable[[], Iterable["Looked | Exception | None"]],
    ) -> Doubt | None:
        """Return the reason why a difference of losses tells nothing, None if there is none; or refuse."""
        rows = few.rows.rows
        if losses_differ([whole.report, report], dtypes, rows) is None:
            return None
        again = same()
        if not isinstance(again, Looked) or losses_differ([whole.report, again.report], dtypes, rows):
            return _RANDOM
        alone = [one.report for one in halves() if isinstance(one, Looked)]
        found = losses_differ([whole.report, report, *alone], dtypes, rows)
        if found is None:  # rows that cancel in the sum
            return None
        if found.is_small:
            return Doubt(f"the losses of all rows and of micro-batches are {found.words}, near rounding")
        raise say.losses_differ(rows, found.words, sizes, self.task.progress.compared)


_NEEDS_GRAPH = Doubt("the loss of many rows differs without a graph, and with one they do not fit")
_NO_WEIGHT = Doubt("no row has weight", is_quiet=True)
_RANDOM = Doubt("the same rows give another loss the second time", is_quiet=True)
_OF_PROCESS = Doubt("it draws numbers of Python or NumPy, which cannot be drawn again by rows")


def _only(made: Bench, rows: range) -> Bench:
    return made if len(rows) == made.rows.rows else made._replace(rows=made.rows.only(rows))
