"""Guard: the conditions of a cut, and when loss and gradient are compared"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import Literal

from torch import Tensor, nn

from anybatch.batchnorm import refuse_batch_norms
from anybatch.compare import (
    Covers,
    Doubt,
    Outcome,
    Witness,
    joined,
    read_rows,
    refuse_what_depends_on_the_cut,
)
from anybatch.core import Batch, Padding, PlanError, StepReport, is_due
from anybatch.engine import Plan, Progress, Task

Check = bool | int | Literal["always"]
Kind = Literal["step", "add", "dry", "foresee", "recut"]
_UNCUT = 64  # updates without a cut after which a warning says so
_dtype_and_axes: Callable[[Tensor], Hashable] = attrgetter("dtype", "ndim")


class Guard:
    """The conditions of a cut: no meeting that was not allowed, and a loss that adds up.

    Loss and gradient of a few rows, and the loss of all rows, are compared at the updates of the calendar,
    counted where rows are cut. Without `check` nothing is compared; with "always" each update is.
    """

    def __init__(self, *, batch_norm: str | None, check: Check, is_bounded: bool = False) -> None:
        self.batch_norm, self.checks, self._is_bounded = batch_norm, check, is_bounded
        self._every = () if check in (True, False) else (1 if check == "always" else check,)
        self.updates = 0  # that were cut
        self.is_due = True  # this update, once it is cut, is compared, whatever comes
        self._has_begun = False
        self._covers: dict[Hashable, Covers] = {}  # by the kind of rows
        self._has_warned = False
        self._calls = 0

    def warn_of_use(self, micro_batch: int | None) -> None:
        """Warn, once, of batches that are never cut."""
        self._calls += 1
        if self._calls == _UNCUT + 1 and micro_batch is not None and self.checks and not self.updates:
            warnings.warn(
                f"Expected batches of more than micro_batch={micro_batch} rows, got {_UNCUT} that were not "
                "cut. Pass whole batches: each call makes an update. Or leave micro_batch out.",
                stacklevel=3,
            )

    def begin_update(self, progress: Progress) -> None:
        """Begin an update; it is counted once it is cut."""
        self._has_begun, progress.unchecked, progress.judge = False, "", None
        self.is_due = is_due(self.updates + 1, *self._every)

    def admit(
        self,
        task: Task,
        batch: Batch,
        plan: Plan,
        most: int,
        *,
        kind: Kind,
        kept: Batch | None = None,
        added: int = 0,
        room: Callable[[], float | None] = lambda: None,
        may_wait: bool = False,
    ) -> None:
        """Refuse a plan under which the result may depend on the cut: the one door of every way to run rows.

        `most` rows are known to fit; `room` returns the bytes that a forward may take, None without a budget.
        In a window so many rows were `added` before, of which some are `kept` to be compared with these. Of
        "foresee" nothing runs; "recut" are rows that were not to be cut and no longer fit. The loss of a step
        that `may_wait` is compared once it is there.

        Raises:
            PlanError, LossError: what meets, and the ways out.
        """
        is_many = task.strategy.is_many
        if is_many and kind == "step" and task.is_synced(plan):
            task.strategy.meet(task, plan.micro_batches)
            task.progress.unchecked = "rows of all ranks meet in SyncBatchNorm, and no rank has them all"
            return
        is_apart = is_many and kind != "foresee"
        if not (plan.is_cut or is_apart or added or batch.order or kind == "recut"):
            return
        if task.network.batch_norms:
            self.refuse_meetings(task)
        if kind == "foresee" or (kind == "add" and not (plan.is_cut or added)):
            return
        self.look(task, batch, plan, most, kept, added if kind == "add" else -1)
        if kind == "step":
            self.witness(task, batch, plan, room, may_wait=may_wait)

    def witness(
        self,
        task: Task,
        batch: Batch,
        plan: Plan,
        room: Callable[[], float | None],
        *,
        may_wait: bool = False,
    ) -> None:
        """Refuse a loss that is not that of all rows, in an update that is due; see `admit`."""
        if not (self.checks and plan.is_cut and self.is_due):
            return
        covers = self.covers(batch)
        doubt = covers.doubt
        if doubt is not None and not doubt.lasts and self.updates == 1:  # the step may tell a better reason
            return
        witness = Witness(task, batch, plan, room(), covers)
        whole = witness.whole() if may_wait and not task.strategy.is_many else None
        if whole is not None:
            task.progress.judge = partial(self._judge_loss, witness, whole)
        else:
            self._judge_loss(witness)

    def _judge_loss(
        self, witness: Witness, whole: Outcome | None = None, report: StepReport | None = None
    ) -> None:
        """Compare the step's own loss with that of all rows; if that is not enough, both once more."""
        progress, doubt = witness.task.progress, witness.refuse(whole, report)
        if doubt is None:
            progress.compared = self.updates
        elif not (doubt.is_quiet or progress.unchecked):
            progress.unchecked = doubt.reason

    def look(
        self, task: Task, batch: Batch, plan: Plan, most: int, kept: Batch | None = None, added: int = -1
    ) -> None:
        """Refuse a result that depends on the cut, if rows or attributes are new."""
        if not self.checks:
            task.progress.unchecked = "the Step was made with Options(check=False)"
            return
        if not self._has_begun:
            self._has_begun, self.updates = True, self.updates + 1
            if self.is_due:
                for one in self._covers.values():
                    one.renew()
        covers = self.covers(batch)
        size = plan.micro_batch if plan.is_cut else most
        smallest = min(plan.cut) if plan.cut and plan.is_cut else batch.rows % size or size
        if not self._is_bounded and covers.wants(batch, smallest):
            tries = [rows for rows in (kept and joined(kept, batch), batch) if rows and rows.rows > 1]
            for rows in tries:  # a loss may hold what belongs to the rows of one `add`
                compare = refuse_what_depends_on_the_cut
                doubt = compare(task, rows, plan, most, covers, is_late=added >= 0)
                if doubt is None or rows is tries[-1]:
                    self._judge(covers, doubt)
                    break
            else:
                covers.doubt = Doubt("a single row has no cut to compare")
        if covers.doubt is not None:
            task.progress.unchecked = covers.doubt.reason

    def covers(self, batch: Batch) -> Covers:
        """Return what was compared of rows of this kind: of these dtypes and numbers of dimensions."""
        kind = kind_of(batch)
        return self._covers.get(kind) or self._covers.setdefault(kind, Covers())

    def wants(self, batch: Batch) -> bool:
        """Return True if rows are to be compared, within a budget in parts of two."""
        return bool(self.checks) and batch.rows > 1 and self.covers(batch).wants(batch, 2)

    def read(self, task: Task, batch: Batch, plan: Plan, fits: Callable[[int], bool]) -> None:
        """Read micro-batches of a few rows with the task's reader, and look, if that is wanted."""
        norms, covers = task.network.batch_norms and self.batch_norm != "frozen", self.covers(batch)
        if self.checks and not norms and covers.wants(batch, min(2, batch.rows)):
            self._judge(covers, read_rows(task, batch, plan, fits, covers))
        else:
            read_rows(task, batch, plan, fits, None)

    def _judge(self, covers: Covers, doubt: Doubt | None) -> None:
        """Warn once if nothing was found out."""
        if covers.judged(doubt) and doubt is not None and not (doubt.is_quiet or self._has_warned):
            self._has_warned = True
            warnings.warn(
                f"Expected to find the same loss and gradient for every split, but {doubt.reason}. The "
                "step goes on, and its reports say checked=False. ab.check(model, loss, batch) judges "
                "it; Options(check=False) skips this look.",
                stacklevel=2,
            )

    def refuse_in_synced(self, task: Task, settings: Plan, *, has_budget: bool) -> None:
        """Refuse what runs a forward twice, or on one rank alone, where rows of all ranks meet in it."""
        plain = [norm for norm in task.network.batch_norms if not isinstance(norm, nn.SyncBatchNorm)]
        refuse_batch_norms(task.model, plain, over_ranks=True)
        asked = {
            "memory": has_budget,
            "recompute": bool(settings.blocks),
            f"precision={str(settings.precision)!r}": settings.precision.loss_scale is not None,
            f"non_finite={settings.non_finite!r}": settings.non_finite != "raise",
        }
        if found := [name for name, is_asked in asked.items() if is_asked]:
            raise PlanError(
                "Expected one forward and backward of each rank with SyncBatchNorm over ranks, got "
                f"{' and '.join(found)}, which may run one again while others wait in the layer. Leave it "
                'out, or use batch_norm="frozen" or ab.batch_norm_to_group_norm(model).'
            )

    def refuse_meetings(self, task: Task) -> None:
        """Refuse BatchNorm in training mode in more than one micro-batch, unless `batch_norm` was chosen."""
        if self.batch_norm is None:
            refuse_batch_norms(task.model, task.network.batch_norms, over_ranks=task.strategy.is_many)


def kind_of(batch: Batch) -> Hashable:
    """Dtypes and numbers of dimensions: rows of another length are not looked at again. What is trimmed."""
    paddings: Sequence[Padding] = getattr(batch, "paddings", ())
    trimmed = [(one.axes, one.is_left) for one in paddings]
    return (*map(_dtype_and_axes, getattr(batch, "leaves", ())), *trimmed)
