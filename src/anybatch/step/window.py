"""Window: one exact update from micro-batches that the caller provides."""

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_not
from time import perf_counter
from types import TracebackType
from typing import Any

from torch import Tensor

from anybatch import core, engine
from anybatch.audit import AllRows
from anybatch.core import torch_private as private
from anybatch.step.decide import NO_LIMIT
from anybatch.step.meetings import refuse_meetings
from anybatch.trial import whole_of

_HELD = 2**21  # bytes of the first `add`s that a window keeps, and two of them in any case


class OpenWindow(engine.Window):
    """Gradient accumulation for a loop that provides the micro-batches itself.

    Call `add` (forward and backward) for each micro-batch, then `close`, which is `update` and `clear`. As a
    context manager, a window closes itself at the end of the block; an exception discards it.

    While it is open, the window keeps the gradient sums, and every `.grad` is None. If an `add` fails, the
    window is as before that `add`. If memory runs out in an `add`, its rows are processed in halves. Do not
    use a torch `GradScaler` with a window: `precision="fp16-mixed"` scales the loss.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anybatch import Step
        >>> model = nn.Linear(2, 1)
        >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with step.window() as window:
        ...     window.add((torch.zeros(3, 2), torch.zeros(3, 1)))
    """

    __slots__ = ("_adds", "_all_rows", "_is_kept", "_report", "_seconds", "_sizes", "_step", "_trained")

    def __init__(self, step: Any, task: engine.Task) -> None:
        with task.loss.along(core.OpenBatch(), (), task.model, lambda: None) as share:
            pass  # refused is a loss that needs the whole batch
        super().__init__(task, step.planning.settings)
        self._step, self._share = step, share
        self._trained = [*map(_is_trained, task.network.everyone)]
        self._report: core.StepReport | None = None
        self._all_rows: AllRows | None = None  # hears the outputs of a window that is due
        self._is_kept = False  # rows are kept, to compare them at the end
        self._adds, self._sizes = list[tuple[core.Batch, list[int]]](), list[int]()  # of a window that is due
        self._seconds = 0.0
        task.strategy.begin(task, self._settings)
        self._refuse_gradients()  # a later zero_grad() could not clear what is set aside

    def discard(self, error: BaseException | None = None) -> None:
        """End the window. Without an update, model, gradients and random state are as before it.

        Args:
            error: the reason, which other ranks are told.
        """
        if self._phase != "closed":
            super().discard(error)
            if self._all_rows is not None:
                self._all_rows.__exit__()
            vars(self._step)["open_window"] = None  # which nobody else may set

    @property
    def rows(self) -> int:
        """Rows added so far."""
        return self._rows

    @property
    def report(self) -> core.StepReport | None:
        """The report of the update; None before it."""
        return self._report

    def add(self, micro: Any, *others: Any) -> None:
        """Run forward and backward on one micro-batch, and add its gradient to the sums.

        If this fails, the window is as before; on several ranks it ends, and the others raise at `close`.

        Args:
            micro: the rows of one micro-batch, in the same form as a batch.

        Raises:
            WindowError: the window is not open, or a `.grad` is not zero.
            BatchError, LossError: see `Step.__call__`.
        """
        if others:
            refuse_others("add", others)
        if self._phase != "open":
            self._expect("open", "add a micro-batch")
        token = core.running.set(True)
        try:
            self._add(micro)
        except BaseException as error:
            if self._task.strategy.is_many and self._phase == "open":  # others must not wait for this one
                self.discard(error)
            raise
        finally:
            core.running.reset(token)

    def _add(self, micro: Any) -> None:
        began, task, planning = perf_counter(), self._task, self._step.planning
        if any(map(is_not, map(_gradient_of, task.network.parameters), repeat(None))):
            self._refuse_gradients()
        if [*map(_is_trained, task.network.everyone)] != self._trained:
            self._refuse_unfrozen()
        batch = engine.admit(micro, task, self._step.collate)
        if not batch.rows:
            raise core.BatchError(
                f"Expected rows in a window's add, got {batch.rows}. Leave the add out: a rank without rows "
                "closes its window all the same."
            )
        if self._skipped is None:
            plan, running = self._plan(batch)
            self.reader = running.reader
            limit = NO_LIMIT if planning.budget is None else planning.enforced(task, batch)
            with limit, engine.context(plan, task):
                part = self.add_rows(plan, batch)
            if self._skipped is None:
                try:
                    self._sums.take(part.sums)
                except BaseException as error:  # some sums may hold it and others not
                    self.discard(error)
                    raise
                planning.learn(task, batch, max(part.sums.rows), part.sums.too_large())
                if self._is_kept:
                    self._adds.append((batch, [*map(private.version, batch.leaves)]))
                    self._sizes += part.sums.rows
                    nbytes = sum(one.nbytes for one in core.tensors_in(batch.given))
                    self._is_kept = len(self._adds) < 2 or len(self._adds) * nbytes <= _HELD
        self._rows += batch.rows
        self._seconds += perf_counter() - began

    def _plan(self, batch: core.Batch) -> tuple[engine.Plan, engine.Task]:
        planning, task = self._step.planning, self._task
        audit = planning.audit
        plan, running = planning.plan_for(task, batch, is_add=True)
        if task.network.batch_norms and (self._rows or task.strategy.is_many or plan.is_cut):
            refuse_meetings(task, plan)
        if audit.is_due(task, batch, plan) and self._all_rows is None:
            self._all_rows = AllRows(task, plan, audit.known.kind(batch.kind), planning.room())
            self._is_kept = True
        return plan, running

    def _compare(self) -> None:
        """Compare the rows that were kept, in a window that is due."""
        planning, task = self._step.planning, self._task
        adds, self._adds = self._adds, []
        if self._all_rows is None or len(self._sizes) < 2:
            return
        self._all_rows.calls.stop()
        is_same = all([*map(private.version, one.leaves)] == known for one, known in adds)
        whole = None
        try:
            whole = whole_of([one for one, _ in adds]) if is_same else None
        except Exception as error:
            if not core.ran_out_of_memory(error):
                raise
            core.released(error)
        audit, sizes = planning.audit, tuple(self._sizes)
        rows = whole or max([one for one, _ in adds], key=attrgetter("rows"))
        plan = replace(self._settings, rows=rows.rows, micro_batch=max(sizes), cut=sizes if whole else ())
        if audit.is_due(task, rows, plan, rows.rows):
            with planning.enforced(task, rows):
                audit.compare(task, rows, plan, max(sizes), is_late=True)
        if whole is None:
            task.progress.unchecked = "rows of the window differ in shape, were written to, or do not fit"
        else:
            is_all = whole.rows == self._rows
            self._all_rows.plan = plan
            task.progress.judge = lambda _, report: (
                self._all_rows and self._all_rows.judge(whole, sizes, report if is_all else None)
            )

    def update(self) -> core.StepReport:
        """Divide and clip the gradient, and step optimizers and schedulers.

        The gradients stay in `.grad` until `clear`. If the update fails, the window is discarded.

        Raises:
            WindowError: nothing was added, the window is not open, or gradients were changed.
            LossError: see `Step.__call__`.
        """
        self._expect("open", "update")
        self._refuse_gradients()
        task = self._task
        if not (self._rows or task.strategy.is_many):  # other ranks may have rows
            raise core.WindowError(
                f"Expected at least one micro-batch in the window, got {self._rows} rows. "
                "Call add() first, or discard()."
            )
        task.progress.began = perf_counter() - self._seconds
        try:
            with engine.context(self._settings, task):
                self._compare()
                self._report = self.finish(self._step.end)
        except BaseException as error:
            failed = engine.no_room_for_update(error, self._sums) if self._phase == "open" else None
            if isinstance(error, core.NonFinite):
                failed = self.not_finite()
            self.discard(failed or error)
            if failed is not None:
                raise failed from None
            raise
        try:
            task.callbacks.tell(self._report)
        except BaseException as error:
            task.strategy.abandon(error)
            raise
        return self._report

    def clear(self) -> None:
        """Clear the gradients and end the window.

        Raises:
            WindowError: no update was made yet.
        """
        self._expect("updated", "clear")
        self.discard()

    def close(self) -> core.StepReport:
        """Update and clear.

        Raises:
            WindowError, LossError: see `update`.
        """
        self._expect("open", "close")
        try:
            return self.update()
        finally:
            if self._phase == "updated":
                self.clear()

    def __repr__(self) -> str:
        return f"Window({self._phase}, {core.counted(self._rows, 'row')})"

    def __enter__(self) -> "OpenWindow":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._phase == "open":
                self.close()
        finally:
            self.discard(error if self._phase == "open" else None)

    def _refuse_gradients(self) -> None:
        """Drop gradients that are zero, and refuse others by name: between two `add`s there are none."""
        found = [(p, p.grad) for p in self._task.network.parameters if p.grad is not None]
        names = self._task.names()
        wrong = [names[p] for p, gradient in found if not _is_zero(gradient)]
        if wrong:
            raise core.WindowError(
                f"Expected no gradients when a window opens, and while it is open, got a `.grad` that is not "
                f"zero of {wrong[:3]}. Call optimizer.zero_grad() before the window is opened, and other "
                "backward() calls or clipping after it is over."
            )
        engine.clear([p for p, _ in found])

    def _refuse_unfrozen(self) -> None:
        trained = sum(map(_is_trained, self._task.network.everyone))
        raise core.WindowError(
            f"Expected the same {sum(self._trained)} parameters to be trained throughout a window, got "
            f"{trained}. Freeze and unfreeze between windows."
        )

    def _expect(self, phase: str, wish: str) -> None:
        if self._phase != phase:
            raise core.WindowError(
                f"Expected a window that is {phase} to {wish}, got one that is {self._phase}. "
                "Open a new one with step.window()."
            )


def refuse_others(name: str, others: tuple[object, ...]) -> None:
    """Raise BatchError for a call as in `step(inputs, target)`: a batch is one argument."""
    if others:
        raise core.BatchError(
            f"Expected one batch, got {1 + len(others)} arguments. Put them into a tuple, as in "
            f"{name}((inputs, target))."
        )


_gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_is_trained: Callable[[Tensor], bool] = attrgetter("requires_grad")


def _is_zero(gradient: Tensor) -> bool:
    return core.all_finite([gradient]) and not bool(
        gradient.count_nonzero() if not gradient.is_sparse else gradient.coalesce().values().count_nonzero()
    )


def refuse_open(step: Any) -> None:
    """Raise WindowError while a window of this step is open."""
    if step.open_window is not None:
        raise core.WindowError(
            f"Expected no open window, got one with {step.open_window.rows} rows. Call close() on it for the "
            "update, or discard() to drop its gradients; it is `step.open_window`."
        )
