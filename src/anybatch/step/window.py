"""The window: one update from micro-batches that the caller brings."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from anybatch.core import Batch, Collate, NonFinite, NonFiniteLossError, OpenBatch, StepReport, WindowError
from anybatch.engine import Course, Run, Skipped, Task, too_large, without_update
from anybatch.step import window_state as halfway
from anybatch.step.admit import admit
from anybatch.step.decide import Planning
from anybatch.step.guard import Guard


class Opener(Protocol):
    """What a window asks of the step that opens it."""

    collate: Collate | None
    guard: Guard
    planning: Planning
    open_window: "Window | None"
    loss: object


class Window:
    """The stretch from one update to the next, for callers who bring micro-batches themselves.

    Three phases: `add` (forward and backward) for each micro-batch, `update`, `clear`. `close` is the last
    two. As a context manager it closes at the end, and discards when an exception leaves the block.

    A micro-batch that is refused or fails in its forward leaves the window as it was before it. One that
    fails half-way through its backward discards the window, because half of it is in the sum already:
    everything is as before the window. One that is too large for memory comes in parts.

    Attributes:
        rows: rows added so far.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anybatch import Step
        >>> model = nn.Linear(2, 1)
        >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with step.window() as window:
        ...     window.add((torch.zeros(3, 2), torch.zeros(3, 1)))
    """

    def __init__(self, step: Opener, task: Task, state: Mapping[str, Any] | None = None) -> None:
        batch, settings = OpenBatch(), step.planning.settings
        with task.loss.along(batch, (), task.model, lambda: None) as share:
            pass  # refused is a loss that needs the whole batch
        found = None if state is None else halfway.read(state, task, settings, step.loss)
        self._step, self._task, self._share = step, task, share
        self._run = Run(settings, task, batch, task.loss)
        self._phase = "open"
        self._precision = settings.precision
        self._is_skipped = self._is_undone = False
        self.rows = 0
        if found is not None:
            found.into(self._run, task, settings)
            self.rows, self._is_skipped = found.rows, found.is_skipped
        self._run.mark()

    def add(self, micro: Any) -> None:
        """Forward, backward, accumulate one micro-batch.

        Args:
            micro: the rows of one micro-batch, of the same form as a batch.

        Raises:
            WindowError: the window is not open any more, or somebody else changed gradients meanwhile.
            BatchError, LossError: see `Step.__call__`.
        """
        self._expect("open", "add a micro-batch")
        self._refuse_changed_gradients()
        batch = admit(micro, self._task, self._step.collate)
        if self.rows:
            self._step.guard.refuse_meetings(self._task)
        done, noted = len(self._run.rows), self._run.at_hand.noted
        try:
            if not self._is_skipped:
                with self._precision.arithmetic():
                    self._go(batch)
        except Skipped:  # what else comes in this window is not even looked at
            self._is_skipped = True
        except BaseException:
            self._undo(done, noted)
            raise
        self.rows += batch.rows
        self._run.mark()

    def _undo(self, done: int, noted: object) -> None:
        """Undo a micro-batch that failed; the window with it, if a part of it is in the sums.

        Args:
            done: micro-batches in the sums before it.
            noted: what was noted last before it.
        """
        run = self._run
        if run.at_hand.noted is noted:  # it had not begun
            return
        if run.gradients.holds_part or len(run.rows) > done:
            self.discard()
        else:
            run.at_hand.noted.put_back()

    def _go(self, batch: Batch) -> None:
        """All rows of a micro-batch at once; where memory runs out, in parts."""
        run, planning = self._run, self._step.planning
        with _as_begun(run, self._task) if planning.budget else nullcontext():
            plan = planning.of_window(self._task, batch)
        if plan.is_cut:
            self._step.guard.refuse_meetings(self._task)
        self._step.guard.check_loss(self._task, batch, plan.micro_batch)
        done, failed = len(run.rows), len(run.redone)
        with planning.enforced(self._task):
            Course(
                run=run,
                plan=plan,
                task=self._task,
                batch=batch,
                share=self._share,
                sizes=plan.sizes,
                offset=self.rows,
                in_window=True,
            ).go()
        largest = replace(plan, micro_batch=max(run.rows[done:]))
        planning.learn(batch, largest, failed=too_large(run.redone[failed:]), in_window=True)

    def state(self) -> dict[str, Any]:
        """All that the window needs to go on in another process: copies on the host, as checkpoints hold.

        These are the sums, with their rounding errors, counts and weights, what `discard` puts back, and the
        loss scale. The model, the optimizer and where random streams stand now are none of it:
        `anybatch.train.checkpoint.save` keeps them, and this as its `progress`. `Step.window` takes it.

        Raises:
            WindowError: the window is not open any more, or somebody else changed gradients meanwhile.

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
        self._refuse_changed_gradients()
        settings, loss = self._step.planning.settings, self._step.loss
        return halfway.write(
            self._run, self._task, settings, loss, rows=self.rows, is_skipped=self._is_skipped
        )

    def update(self) -> StepReport:
        """Divide, clip, update optimizers and schedulers; gradients stay to be looked at until `clear`.

        If it fails, the window is discarded.

        Raises:
            WindowError: nothing was added, the window is not open any more, or gradients were changed.
            LossError: see `Step.__call__`.
        """
        self._expect("open", "update")
        self._refuse_changed_gradients()
        if not self.rows:
            raise WindowError(
                f"Expected at least one micro-batch in the window, got {self.rows} rows. "
                "Call add() first, or discard()."
            )
        try:
            report = self._update()
        except BaseException:
            self.discard()
            raise
        self._phase = "updated"
        for listener in self._task.listeners:
            listener(report)
        return report

    def _update(self) -> StepReport:
        is_skipped = self._is_skipped
        try:
            if not is_skipped:
                with self._precision.arithmetic():
                    return self._run.update()
        except (NonFinite, NonFiniteLossError) as error:
            is_skipped = self._step.planning.settings.non_finite == "skip"
            if not is_skipped and isinstance(error, NonFiniteLossError):
                raise
        if is_skipped:
            self._run.undo(is_skipped=True)
            self._is_undone = True
            return without_update(self._run, self.rows)
        raise NonFiniteLossError(
            f"Expected a finite gradient, got NaN or infinity in the sum of {self.rows} rows. No update "
            'was made. A step on all rows at once names those that are bad, and non_finite="drop" or '
            '"skip" looks at each micro-batch as it comes.'
        )

    def clear(self) -> None:
        """Drop the gradients; the window is over.

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
        """End the window: without an update, model, buffers, gradients and random state are as before it."""
        if self._phase == "open":
            self._run.undo()
        elif self._phase == "updated":
            if not self._is_undone:  # what was there before has come back
                self._run.clear()
        else:
            return
        self._phase = "closed"
        self._step.open_window = None

    def __enter__(self) -> "Window":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._phase == "open":
                self.close()
        finally:
            self.discard()  # does nothing to a window that is over

    def _refuse_changed_gradients(self) -> None:
        if self._run.is_disturbed():
            self.discard()
            raise WindowError(
                "Expected gradients to be left alone while a window is open, got changed ones, so it was "
                "discarded. Call zero_grad(), backward() or clipping before it is opened or after it is over."
            )

    def _expect(self, phase: str, wish: str) -> None:
        if self._phase != phase:
            raise WindowError(
                f"Expected a window that is {phase} to {wish}, got one that is {self._phase}. "
                "Open a new one with step.window()."
            )


@contextmanager
def _as_begun(run: Run, task: Task) -> Generator[None]:
    """The gradients as the window found them: a plan counts its sums itself."""
    held = [(parameter, parameter.grad) for parameter in (*task.parameters, *task.others)]
    run.before.put_gradients_back()
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
