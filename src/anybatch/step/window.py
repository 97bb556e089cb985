"""The window: one exact update from micro-batches that the caller provides."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_not
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from anybatch.core import (
    Batch,
    BatchError,
    Collate,
    NonFinite,
    NonFiniteLossError,
    OpenBatch,
    StepReport,
    WindowError,
    all_finite,
)
from anybatch.engine import (
    Accumulator,
    NotUndoneError,
    Plan,
    Restart,
    Schedule,
    Task,
    TornUpdateError,
    accumulate,
    admit,
    clear,
    context,
    no_room_for_update,
    observe,
    put_back,
    report_of,
    snapshot,
    too_large,
    update,
)
from anybatch.state import Snapshot, rng
from anybatch.step import window_state
from anybatch.step.decide import Guard, Planning


class Opener(Protocol):
    """What a window asks of the step that opens it."""

    collate: Collate | None
    guard: Guard
    planning: Planning
    loss: object


class Window:
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

    __slots__ = (
        "__weakref__",
        "_before",
        "_is_skipped",
        "_part",
        "_phase",
        "_report",
        "_rows",
        "_seconds",
        "_step",
        "_sums",
        "_task",
        "_trained",
    )

    def __init__(self, step: Opener, task: Task, state: Mapping[str, Any] | None = None) -> None:
        settings = step.planning.settings
        with task.loss.along(OpenBatch(), (), task.model, lambda: None) as share:
            pass  # refused is a loss that needs the whole batch
        self._step, self._task = step, task
        self._before: Snapshot = snapshot(task, OpenBatch())
        self._sums = Accumulator(settings, task, OpenBatch())
        self._sums.share = lambda index: share(index[0], index[-1] + 1)
        self._trained = [*map(_is_trained, task.everyone)]
        self._part: Accumulator | None = None  # of the last add, for the next one
        self._phase = "open"
        self._report: StepReport | None = None
        self._is_skipped = False
        self._rows, self._seconds = 0, 0.0
        if state is not None:
            restored = window_state.restore(state, self._sums, task, settings, step.loss)
            self._rows, self._is_skipped = restored
        task.progress.unchecked = ""
        task.strategy.begin(task, settings)  # before gradients that are refused on several ranks are gone
        clear(task.parameters)

    @property
    def rows(self) -> int:
        """Rows added so far."""
        return self._rows

    @property
    def report(self) -> StepReport | None:
        """The report of the update; None before it."""
        return self._report

    def add(self, micro: Any) -> None:
        """Run forward and backward on one micro-batch, and add its gradient to the sums.

        If this fails, the window is as before; on several ranks it ends, and the others raise at `close`.

        Args:
            micro: the rows of one micro-batch, in the same form as a batch.

        Raises:
            WindowError: the window is not open, or a `.grad` is not zero.
            BatchError, LossError: see `Step.__call__`.
        """
        self._expect("open", "add a micro-batch")
        try:
            self._add(micro)
        except BaseException as error:
            if self._task.strategy.is_many and self._phase == "open":  # others must not wait for this one
                self._task.strategy.abandon(error)
                self.discard()
            raise

    def _add(self, micro: Any) -> None:
        began = perf_counter()
        self._refuse_gradients()
        self._refuse_unfrozen()
        batch = admit(micro, self._task, self._step.collate)
        if not batch.rows:
            raise BatchError(
                f"Expected rows in a window's add, got {batch.rows}. Leave the add out: a rank without rows "
                "closes its window all the same."
            )
        guard, planning = self._step.guard, self._step.planning
        if self._rows or self._task.strategy.is_many:
            guard.refuse_meetings(self._task)
        if not self._is_skipped:
            plan = planning.of_window(self._task, batch, guard)
            if plan.is_cut:
                guard.refuse_meetings(self._task)
            if self._rows or plan.is_cut:
                guard.look(self._task, batch, plan, plan.micro_batch)
            with planning.enforced(self._task):
                part = self._added(plan, batch)
            if part is not None:
                try:
                    self._sums.absorb(part)
                except BaseException:  # some sums may hold it and others not
                    self.discard()
                    raise
                largest, failed = max(part.rows), too_large(part.redone)
                done = plan if largest == plan.micro_batch else replace(plan, micro_batch=largest)
                planning.learn(batch, done, failed=failed, in_window=True)
                self._part = None if part.redone else part
        self._rows += batch.rows
        self._seconds += perf_counter() - began

    def _added(self, plan: Plan, batch: Batch) -> Accumulator | None:
        """The sums of these rows, begun again where they must be; None where the update is to be skipped."""
        again: dict[str, Any] = {}
        while True:
            try:
                return self._attempt(plan, batch, **again)
            except Restart as restart:
                plan, again = restart.plan, restart.again

    def _attempt(self, plan: Plan, batch: Batch, **again: Any) -> Accumulator | None:
        task = self._task
        with context(plan, task):
            before = snapshot(task, batch)
            part, self._part = self._part, None
            if part is None or part.plan is not plan or not part.restart(batch):
                part = Accumulator(plan, task, batch, window=self._sums, **again)
            try:
                clear(task.reached)
                accumulate(Schedule(plan, part, before), part, before)
                if task.reached:
                    before.put_gradients_back(task.reached)
            except NonFiniteLossError as error:
                reached = error.reached or rng.capture_process()
                self._undo(before, part, error)
                if plan.non_finite != "skip" or isinstance(error, NotUndoneError):
                    raise
                rng.restore_process(reached)
                self._is_skipped = True  # what else comes in this window is not even looked at
                return None
            except BaseException as error:
                self._undo(before, part, error)
                raise
        return part

    def _undo(self, before: Snapshot, part: Accumulator, error: BaseException) -> None:
        put_back(before, part, error)
        clear(self._task.parameters)

    def state(self) -> dict[str, Any]:
        """The state of an open window, to continue it in another process with `Step.window(state)`.

        It holds copies on the CPU of the gradient sums, their counts and weights, and the loss scale. It does
        not hold the model, the optimizer or the random state: save them with
        `anybatch.train.checkpoint.save`, and this state as its `progress`.

        Raises:
            WindowError: the window is not open.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from anybatch import Step
            >>> model = nn.Linear(2, 1)
            >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
            >>> window = step.window()
            >>> window.add((torch.zeros(3, 2), torch.zeros(3, 1)))
            >>> state = window.state()
            >>> window.discard()
            >>> again = step.window(state)
            >>> again.add((torch.zeros(2, 2), torch.zeros(2, 1)))
            >>> again.close().cut
            (3, 2)
        """
        self._expect("open", "be saved")
        settings, loss = self._step.planning.settings, self._step.loss
        return window_state.write(
            self._sums, self._task, settings, loss, rows=self.rows, is_skipped=self._is_skipped
        )

    def update(self) -> StepReport:
        """Divide and clip the gradient, and step optimizers and schedulers.

        The gradients stay in `.grad` until `clear`. If the update fails, the window is discarded.

        Raises:
            WindowError: nothing was added, the window is not open, or gradients were changed.
            LossError: see `Step.__call__`.
        """
        self._expect("open", "update")
        self._refuse_gradients()
        if not (self.rows or self._task.strategy.is_many):  # other ranks may have rows
            raise WindowError(
                f"Expected at least one micro-batch in the window, got {self.rows} rows. "
                "Call add() first, or discard()."
            )
        self._task.progress.began = perf_counter() - self._seconds
        try:
            report = self._update()
        except TornUpdateError as torn:  # nothing can be put back
            self._task.strategy.abandon(torn.error)
            self._phase = "updated"
            self.discard()
            raise torn.error from None
        except BaseException as error:
            self._task.strategy.abandon(error)
            failed = no_room_for_update(error, self._sums)
            self.discard()
            if failed is not None:
                raise failed from None
            raise
        self._phase, self._report = "updated", report
        try:
            self._task.tell(report)
        except BaseException as error:
            self._task.strategy.abandon(error)
            raise
        return report

    def _update(self) -> StepReport:
        sums, task = self._sums, self._task
        policy = self._step.planning.settings.non_finite
        try:
            if not self._is_skipped:
                weights = task.strategy.close(sums)
                gradient = task.strategy.reduce(sums.finish(weights))
                observe(gradient, task)
                with context(sums.plan, task):
                    return update(gradient, weights, sums, self._before)
        except (NonFinite, NonFiniteLossError) as error:
            if policy != "skip":
                raise self._not_finite() if isinstance(error, NonFinite) else error from None
        task.strategy.abandon(self._not_finite())  # then the others skip it, too
        reached = rng.capture_process()
        self._before.put_back()
        rng.restore_process(reached)
        return report_of(sums, {}, math.nan, updated=False, rows=self.rows)

    def _not_finite(self) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"Expected a finite gradient, got NaN or infinity in the sum of {self.rows} rows. No update "
            'was made. A step on all rows at once names those that are bad, and non_finite="drop" or '
            '"skip" looks at each micro-batch as it comes.'
        )

    def clear(self) -> None:
        """Clear the gradients and end the window.

        Raises:
            WindowError: no update was made yet.
        """
        self._expect("updated", "clear")
        self.discard()

    def close(self) -> StepReport:
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

    def discard(self) -> None:
        """End the window. Without an update, model, gradients and random state are as before it."""
        if self._phase == "closed":
            return
        self._sums.close()
        if self._phase == "open":
            self._task.strategy.abandon(WindowError(f"A window of {self.rows} rows was discarded."))
            self._before.put_back()
            self._task.scale.load(self._sums.scale_before)
        elif self._sums.is_updated:
            clear(self._task.parameters)
        else:
            self._before.put_gradients_back(self._task.parameters)
        self._phase = "closed"
        vars(self._step)["open_window"] = None  # which nobody else may

    def __enter__(self) -> "Window":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._phase == "open":
                self.close()
            elif error is not None and self._phase == "open":
                self._task.strategy.abandon(error)
        finally:
            self.discard()  # does nothing to a window that is over

    def _refuse_gradients(self) -> None:
        """Between two `add`s nobody has gradients: zeros are dropped, others are refused by name."""
        if not any(map(is_not, map(_gradient_of, self._task.parameters), repeat(None))):
            return
        found = [(p, p.grad) for p in self._task.parameters if p.grad is not None]
        names = self._task.names()
        wrong = [names[p] for p, gradient in found if not _is_zero(gradient)]
        if wrong:
            raise WindowError(
                f"Expected no gradients while a window is open, got a `.grad` that is not zero of "
                f"{wrong[:3]}. "
                "Clear it with zero_grad(), and call backward() or clipping before the window is opened or "
                "after it is over."
            )
        clear([p for p, _ in found])

    def _refuse_unfrozen(self) -> None:
        trained = [*map(_is_trained, self._task.everyone)]
        if trained != self._trained:
            raise WindowError(
                f"Expected the same {sum(self._trained)} parameters to be trained throughout a window, got "
                f"{sum(trained)}. Freeze and unfreeze between windows."
            )

    def _expect(self, phase: str, wish: str) -> None:
        if self._phase != phase:
            raise WindowError(
                f"Expected a window that is {phase} to {wish}, got one that is {self._phase}. "
                "Open a new one with step.window()."
            )


_gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_is_trained: Callable[[Tensor], bool] = attrgetter("requires_grad")


def _is_zero(gradient: Tensor) -> bool:
    return all_finite([gradient]) and not bool(
        gradient.count_nonzero() if not gradient.is_sparse else gradient.coalesce().values().count_nonzero()
    )
