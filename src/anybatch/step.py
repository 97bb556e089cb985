"""The front door: one exact optimizer step per logical batch, however it is cut."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Integral
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batch import Batch, Collate, OpenBatch
from anybatch.door import admit
from anybatch.errors import OptimizerError, PlanError, WindowError
from anybatch.events import Listener, StepReport
from anybatch.execute import Run, Task, execute
from anybatch.losses.additive import refuse_what_does_not_add_up
from anybatch.losses.resolve import check as check_loss
from anybatch.losses.resolve import module_of, resolve
from anybatch.meetings import batch_norms, check_batch_norm, refuse
from anybatch.optimize import check_optimizers, check_schedulers, owned
from anybatch.plan import Plan, check_micro_batch


class Step:
    """Takes the whole logical batch and does exactly one exact optimizer step.

    The result does not depend on the cut: micro-batches of any size give the gradient of the whole batch, up
    to the order of additions. Uncut and with default options it is, bit for bit, the loop
    `loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()`.

    Where rows meet inside the model no cut is exact. BatchNorm in training mode is refused in a batch that is
    cut, unless `batch_norm` says what is to be done; `anybatch.check` finds every other meeting. Dropout
    draws its masks micro-batch by micro-batch, as with any gradient accumulation.

    Args:
        model: called on each micro-batch.
        loss: a loss of torch as a module, function or `functools.partial`; a function
            `(model, micro) -> ab.Total` or a mapping of named totals; `ab.Terms`; `ab.WholeBatch`, for a loss
            over the outputs of all rows; or `ab.ModelLoss`, for a model that computes its own.
        optimizer: a torch optimizer, or several that share no parameter.
        micro_batch: rows that go through the model together; None for the whole batch at once.
        clip_norm: largest 2-norm of the gradient, clipped once on the whole batch's gradient; None for none.
        scheduler: learning-rate scheduler, or several; stepped once per update; None for none.
        collate: if given, a batch is a list of samples, and this builds the tensors of each micro-batch.
        accumulate: dtype of gradient sums; None for float32 or the parameter's if wider.
        compensated: Kahan summation of gradients, at one more buffer per parameter.
        batch_norm: what BatchNorm in training mode does: None refuses more than one micro-batch; "micro"
            takes the statistics of each micro-batch, so the result depends on the cut; "frozen" takes the
            running statistics and leaves them as they are, cut or not.
        check: before the first update of a batch that is cut, compare a few rows at once with the same rows
            in parts, if the loss is a function of the caller's own (`anybatch.losses.additive`).
        listeners: functions called with every event (`anybatch.events`).

    Attributes:
        most_rows: rows of the largest batch so far; shorter ones may then be the short tail of an epoch.
        open_window: the window that is not yet over, or None.

    Raises:
        PlanError, LossError, OptimizerError: a choice that cannot be carried out, at once.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=4)
        >>> report = step((torch.randn(10, 3), torch.randint(2, (10,))))
        >>> report.rows, report.micro_batches, report.updated
        (10, 3, True)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: object,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        micro_batch: int | None = None,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        collate: Collate | None = None,
        accumulate: torch.dtype | None = None,
        compensated: bool = False,
        batch_norm: str | None = None,
        check: bool = True,
        listeners: Sequence[Listener] = (),
    ) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"Expected the model to be a torch.nn.Module, got {type(model).__name__}. "
                "Wrap it in a module."
            )
        check_loss(loss)
        self.model = model
        self.loss = loss
        self.optimizers = check_optimizers(optimizer, [*model.parameters(), *module_of(loss).parameters()])
        self.schedulers = check_schedulers(() if scheduler is None else scheduler, self.optimizers)
        check_batch_norm(batch_norm)
        self.batch_norm = batch_norm
        self._looks = 3 if check else 0  # at a loss of the caller's own; some batches tell nothing
        self.collate = collate
        self.listeners = tuple(listeners)
        if micro_batch is not None:
            if isinstance(micro_batch, Integral) and not isinstance(micro_batch, int):
                micro_batch = int(micro_batch)  # NumPy's; a plan holds a plain int
            check_micro_batch(micro_batch)
        self.micro_batch = micro_batch
        # A plan for a batch not yet seen: what it refuses is refused here, not in the first step.
        self._window_plan = Plan(
            rows=0,
            micro_batch=0,
            clip_norm=math.inf if clip_norm is None else clip_norm,
            accumulate="auto" if accumulate is None else str(accumulate).removeprefix("torch."),
            compensated=compensated,
            batch_norm="micro" if batch_norm is None else batch_norm,
        )
        self.most_rows = 0
        self.open_window: Window | None = None

    def __call__(self, batch: Any) -> StepReport:
        """One forward and backward per micro-batch, one update.

        If anything fails before the update, model, buffers, gradients, optimizer and random state are as they
        were. What fails after it (a scheduler past its end, a listener) leaves the update made; what fails
        inside an optimizer's own `step()` cannot be undone.

        Args:
            batch: `(inputs, target)`, `(a, b, ..., target)` or a mapping with a target for torch's losses;
                any nesting of tensors with rows first for your own; a list of samples with a `collate`.

        Returns:
            What happened, as floats and counts.

        Raises:
            BatchError, PlanError, LossError, OptimizerError, WindowError: see `anybatch.errors`.
        """
        self._refuse_open_window()
        task = self._task()
        logical = admit(batch, task, self.collate)
        plan = self.plan(logical.rows)
        if plan.is_cut:
            self.refuse_meetings(task)
            self.check_loss(task, logical, plan.micro_batch)
        self.most_rows = max(self.most_rows, logical.rows)
        return execute(plan, task, logical)

    def window(self) -> "Window":
        """Open a window for a loop that brings micro-batches itself.

        Weights of the whole batch are not known beforehand, so the gradient is divided once, at the end.

        Example:
            >>> model = nn.Linear(3, 1)
            >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
            >>> window = step.window()
            >>> for rows in (4, 2):
            ...     window.add((torch.randn(rows, 3), torch.randn(rows, 1)))
            >>> window.close().rows
            6
        """
        self._refuse_open_window()
        task = self._task()
        batch = OpenBatch()
        task.loss.along(batch, 0, self.model, lambda: None)  # refuses a loss that needs the whole batch
        self.open_window = Window(self, task, Run(self._window_plan, task, batch, task.loss))
        return self.open_window

    @property
    def loss_module(self) -> nn.Module:
        """The module the loss is or holds, an empty one if none: its parameters may be trained too."""
        return module_of(self.loss)

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The factor of each named term in the loss, 1 where none is given."""
        return resolve(self.loss).coefficients

    def plan(self, rows: int) -> Plan:
        """How a batch of this many rows will be cut.

        A batch shorter than a micro-batch is refused, unless one of at least a micro-batch came before: then
        it is the short tail of an epoch and goes through uncut.
        """
        micro_batch = rows if self.micro_batch is None else self.micro_batch
        if rows < micro_batch <= self.most_rows:
            micro_batch = rows
        return _planned(self._window_plan, rows, micro_batch)

    def _task(self) -> Task:
        """All is read anew: callers unfreeze layers and change settings between steps."""
        held = owned(self.optimizers)
        trainable = [p for p in held if p.requires_grad]
        if not trainable:
            raise OptimizerError(
                f"Expected at least one trainable parameter in the optimizer, got {len(held)} that are all "
                "frozen. Set requires_grad=True on what is to be trained."
            )
        loss = resolve(self.loss)
        modules = [*self.model.modules(), *module_of(self.loss).modules()]  # one walk serves all
        tables = [module._parameters for module in modules]  # pyright: ignore[reportPrivateUsage]
        inside = {p for table in tables for p in table.values() if p is not None}
        return Task(
            model=self.model,
            modules=modules,
            loss=loss,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            parameters=trainable,
            others=list(inside.union(held).difference(trainable)),
            # In a loss that sees all rows at once they do not depend on the cut.
            batch_norms=batch_norms(self.model.modules() if loss.divided else modules),
            devices={p.device for p in inside},
            listeners=self.listeners,
        )

    def check_loss(self, task: Task, batch: Batch, micro_batch: int) -> None:
        """Before the first update: whether a loss of the caller's own adds up. Once, if the rows can tell."""
        if self._looks:
            said = refuse_what_does_not_add_up(task.loss, task.model, task.modules, batch, micro_batch)
            self._looks = 0 if said else self._looks - 1

    def refuse_meetings(self, task: Task) -> None:
        """Where there is more than one micro-batch: no BatchNorm in training mode unless one was chosen."""
        if self.batch_norm is None:
            refuse(self.model, task.batch_norms)

    def _refuse_open_window(self) -> None:
        if self.open_window is not None:
            raise WindowError(
                f"Expected no open window, got one with {self.open_window.rows} rows. Call close() on it for "
                "the update, or discard() to drop its gradients; it is `step.open_window`."
            )


@lru_cache(maxsize=64)  # batches of an epoch have one or two sizes
def _planned(like: Plan, rows: int, micro_batch: int) -> Plan:
    return replace(like, rows=rows, micro_batch=micro_batch)


class Window:
    """The stretch from one update to the next, for callers who bring micro-batches themselves.

    Three phases: `add` (forward and backward) for each micro-batch, `update`, `clear`. `close` is the last
    two. As a context manager it closes at the end, and discards when an exception leaves the block.

    A micro-batch that is refused or fails in its forward leaves the window as it was before it. One that
    fails half-way through its backward discards the window, because half of it is in the sum already:
    everything is as before the window.

    Attributes:
        rows: rows added so far.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with step.window() as window:
        ...     window.add((torch.zeros(3, 2), torch.zeros(3, 1)))
    """

    def __init__(self, step: Step, task: Task, run: Run) -> None:
        self._step, self._task, self._run = step, task, run
        self._phase = "open"
        run.mark()
        self.rows = 0

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
            self._step.refuse_meetings(self._task)
        self._step.check_loss(self._task, batch, batch.rows)
        before = self._run.surroundings()
        try:
            with self._run.conditions():
                self._run.add(next(batch.cut(batch.rows)), self._task.loss, batch.rows)
        except BaseException:
            if self._run.is_torn:
                self.discard()
            else:
                before.put_back()
            raise
        self.rows += batch.rows
        self._run.mark()

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
            report = self._run.update()
        except BaseException:
            self.discard()
            raise
        self._phase = "updated"
        for listener in self._task.listeners:
            listener(report)
        return report

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
