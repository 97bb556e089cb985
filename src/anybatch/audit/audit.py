"""Audit: what is due in an update, and the comparisons; the one place that decides both"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Literal

from anybatch.audit import say
from anybatch.audit.all_rows import AllRows
from anybatch.audit.few_rows import compare_few, read_rows
from anybatch.audit.known import RAGGED, SMALLEST, TRIES, Doubt, Known, KnownKind
from anybatch.core import Batch
from anybatch.engine import Plan, Task

Check = bool | int | Literal["always"]
NOTHING = nullcontext()


class Audit:
    """The comparisons of a step: loss and gradient of a few rows, and the loss of all rows, by other cuts.

    They are made at the updates of the calendar (`engine.is_due`), and where rows or attributes come that no
    comparison has covered. Without `check` there are none; "always" makes each update due.

    Attributes:
        known: what was compared.
    """

    def __init__(self, *, check: Check, is_bounded: bool = False) -> None:
        self.checks, self._is_bounded = check, is_bounded
        self.every = () if check in (True, False) else (1 if check == "always" else check,)
        self.known = Known()
        self._has_warned = False
        self._renewed = 0

    def is_due(self, task: Task, batch: Batch, plan: Plan, most: int = 0) -> bool:
        """Return True if these rows are to be compared; the one method that a plain step enters.

        That is at an update of the calendar, and for rows that are not covered by what is known: more of
        them, smaller parts, another length, a first number of 0 or less, other attributes of model or loss.
        `most` rows run at once where the plan does not cut.
        """
        progress = task.progress
        if not self.checks:
            progress.unchecked = "the Step was made with Options(check=False)"
            return False
        kind = self.known.get(batch.kind)
        if kind is None:
            kind = self.known[batch.kind] = KnownKind()
        if progress.is_due and self._renewed != progress.begun:
            self._renewed = progress.begun
            for one in self.known.values():
                one.left = max(one.left, 1)
        size = plan.micro_batch if plan.is_cut else most or batch.rows
        smallest = min(plan.cut) if plan.cut and plan.is_cut else batch.rows % size or size
        smallest = min(smallest, SMALLEST)
        found = batch.rows > kind.rows or smallest < kind.smallest
        kind.rows, kind.smallest = max(batch.rows, kind.rows), min(smallest, kind.smallest)
        if kind.form is not RAGGED and (batch.draws or batch.like != kind.form):
            found |= kind.is_longer(batch)
        for at, leaf in enumerate(batch.leaves):
            lowest = kind.lowest.get(at, 2)
            # Real numbers may be a mask or weights as long as none is negative.
            is_open = lowest > (0 if leaf.is_floating_point() else -1) and not leaf.is_complex()
            if is_open and leaf.device.type == "cpu" and leaf.numel():
                low = leaf.detach().min().item()
                kind.lowest[at] = min(lowest, (low > 0) - (low < 0))
                found |= kind.lowest[at] < lowest
        raw = [place.read(place.key) for place in kind.places]
        if not all(map(is_, raw, kind.raw)):
            found |= kind.has_other_values(raw)
        if found:
            kind.left = TRIES
        if kind.doubt is not None:
            progress.unchecked = kind.doubt.reason
        elif kind.doubt_of_all is not None and not kind.doubt_of_all.is_quiet:
            progress.unchecked = kind.doubt_of_all.reason
        if progress.is_due if self._is_bounded else kind.left > 0:  # within a budget few rows are read first
            kind.asked = progress.begun
        return kind.asked == progress.begun

    def __call__(
        self, task: Task, batch: Batch, plan: Plan, most: int, room: Callable[[], float | None]
    ) -> AbstractContextManager[object]:
        """Compare a few rows; return a context in which the loss of all rows is compared before the update.

        Raises:
            LossError: loss, gradient or weights depend on the cut.
        """
        kind = self.compare(task, batch, plan, most)
        if not plan.is_cut or (kind.doubt is not None and not kind.doubt.lasts and task.progress.begun == 1):
            return NOTHING  # the step itself may tell a better reason
        return AllRows(task, plan, kind, room(), batch)

    def compare(self, task: Task, batch: Batch, plan: Plan, most: int, *, is_late: bool = False) -> KnownKind:
        """Compare a few rows, unless that was done while they were read; `is_late` as in a window."""
        kind = self.known.kind(batch.kind)
        if not self._is_bounded and kind.left:
            self._note(task, kind, compare_few(task, batch, plan, most, kind, is_late=is_late))
        return kind

    def few(self, task: Task, batch: Batch, plan: Plan, most: int) -> None:
        """Compare a few rows of a batch that is not to be updated with, or that no longer fits uncut."""
        if self.is_due(task, batch, plan, most):
            self.compare(task, batch, plan, most)

    def wants(self, task: Task, batch: Batch, settings: Plan) -> bool:
        """Return True if rows are to be compared, in parts of two, while they are read for a budget."""
        return (
            batch.rows > 1 and self.is_due(task, batch, settings, 2) and self.known.kind(batch.kind).left > 0
        )

    def read(self, task: Task, batch: Batch, plan: Plan, fits: Callable[[int], bool]) -> None:
        """Read micro-batches of a few rows with the task's reader; compare them, if that is wanted."""
        norms = task.network.batch_norms and plan.batch_norm != "frozen"
        kind = None if norms or not self.wants(task, batch, plan) else self.known.kind(batch.kind)
        doubt = read_rows(task, batch, plan, fits, kind)
        if kind is not None:
            self._note(task, kind, doubt)

    def _note(self, task: Task, kind: KnownKind, doubt: Doubt | None) -> None:
        """Note an outcome; warn once if nothing was found out."""
        is_last = kind.judged(doubt, task.progress.begun)
        if kind.doubt is not None:
            task.progress.unchecked = kind.doubt.reason
        if is_last and doubt is not None and not (doubt.is_quiet or self._has_warned):
            self._has_warned = True
            warnings.warn(say.not_compared(doubt.reason), stacklevel=2)
