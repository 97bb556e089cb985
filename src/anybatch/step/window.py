"""The source of a window: how a step admits, plans and learns from each `add`."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from anybatch.core import Batch, Collate, StepReport
from anybatch.engine import Part, Plan, Task, Window, admit
from anybatch.step.decide import Guard, Planning


class Opener(Protocol):
    """The step that opens a window."""

    collate: Collate | None
    guard: Guard
    planning: Planning
    loss: object

    def end(self, window: Window) -> StepReport:
        """Update, or hand the gradient over."""
        ...


class Adds:
    """Decides about each `add` of a window as its step would.

    Args:
        step: the step that opens the window.
        task: its parts.
    """

    def __init__(self, step: Opener, task: Task) -> None:
        self._step, self._task = step, task
        self.loss = step.loss

    def admit(self, micro: Any) -> Batch:
        """Check the rows of a micro-batch."""
        return admit(micro, self._task, self._step.collate)

    def plan(self, batch: Batch, *, is_first: bool) -> Plan:
        """Return how the rows of an `add` are cut, after a look at whether they may be."""
        guard, planning = self._step.guard, self._step.planning
        if not is_first or self._task.strategy.is_many:
            guard.refuse_meetings(self._task)
        plan = planning.of_window(self._task, batch, guard)
        if plan.is_cut:
            guard.refuse_meetings(self._task)
        if plan.is_cut or not is_first:
            guard.look(self._task, batch, plan, plan.micro_batch)
        return plan

    def enforced(self) -> AbstractContextManager[None]:
        """Return a context in which the device keeps to the budget."""
        return self._step.planning.enforced(self._task)

    def learn(self, batch: Batch, plan: Plan, part: Part) -> None:
        """Learn from an `add` that went through."""
        largest, failed = max(part.sums.rows), part.sums.too_large()
        done = plan if largest == plan.micro_batch else replace(plan, micro_batch=largest)
        self._step.planning.learn(batch, done, failed=failed, in_window=True)

    def end(self, window: Window) -> StepReport:
        """Update, or hand the gradient over."""
        return self._step.end(window)

    def closed(self) -> None:
        """Note that the window is over."""
        vars(self._step)["open_window"] = None  # which nobody else may set
