"""The front door: one exact optimizer step per logical batch, however it is cut."""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batch import Batch, Collate, OpenBatch, SampleBatch, TensorBatch
from anybatch.errors import BatchError, OptimizerError, PlanError, WindowError
from anybatch.events import Listener, StepReport
from anybatch.execute import Before, Run, Task, execute
from anybatch.losses.resolve import check, resolve
from anybatch.losses.summed import SummedLoss
from anybatch.plan import Plan, check_micro_batch


class Step:
    """Takes the whole logical batch and does exactly one exact optimizer step.

    The result does not depend on the cut: micro-batches of any size give the gradient of the whole batch, up to the
    order of additions. Uncut and with default options it is, bit for bit, the loop
    `loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()`.

    Where rows meet inside the model (BatchNorm in training mode) or random numbers are drawn by position (dropout), each
    micro-batch has its own statistics and its own draws, as with any gradient accumulation.

    Args:
        model: called on each micro-batch.
        loss: a loss of torch as a module, function or `functools.partial`; a function `(model, micro) -> ab.Total`
            or a mapping of named totals; or `ab.Terms`.
        optimizer: a torch optimizer, or several that share no parameter.
        micro_batch: rows that go through the model together; None for the whole batch at once.
        clip_norm: largest 2-norm of the gradient, clipped once on the whole batch's gradient.
        scheduler: learning-rate scheduler, or several; stepped once per update.
        collate: if given, a batch is a list of samples, and this builds the tensors of each micro-batch.
        accumulate: dtype of gradient sums; None for float32 or the parameter's if wider.
        compensated: Kahan summation of gradients, at one more buffer per parameter.
        listeners: functions called with every event (`anybatch.events`).

    Raises:
        PlanError, LossError, OptimizerError: a choice that cannot be carried out, at once.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4)
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
        clip_norm: float = math.inf,
        scheduler: LRScheduler | Sequence[LRScheduler] = (),
        collate: Collate | None = None,
        accumulate: torch.dtype | None = None,
        compensated: bool = False,
        listeners: Sequence[Listener] = (),
    ) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"Expected the model to be a torch.nn.Module, got {type(model).__name__}. Wrap it in a module.")
        check(loss)
        self.model = model
        self.loss = loss
        self.optimizers = _check_optimizers(optimizer, model, loss)
        self.schedulers = _check_schedulers(scheduler, self.optimizers)
        self.collate = collate
        self.listeners = tuple(listeners)
        self.micro_batch = micro_batch
        if micro_batch is not None:
            check_micro_batch(micro_batch)
        # A plan for a batch not yet seen: what it refuses is refused here, not in the first step.
        self._window_plan = Plan(
            rows=0,
            micro_batch=0,
            clip_norm=clip_norm,
            accumulate="auto" if accumulate is None else str(accumulate).removeprefix("torch."),
            compensated=compensated,
        )
        self._most_rows = 0
        self._open: Window | None = None

    def __call__(self, batch: Any) -> StepReport:
        """One forward and backward per micro-batch, one update.

        If anything fails before the update, model, buffers, gradients, optimizer and random state are as they were.

        Args:
            batch: `(inputs, target)`, `(a, b, ..., target)` or a mapping with a target for torch's losses; any nesting
                of tensors with rows first for your own; a list of samples where `collate` was given.

        Returns:
            What happened, as floats and counts.

        Raises:
            BatchError, PlanError, LossError, OptimizerError, WindowError: see `anybatch.errors`.
        """
        self._refuse_open_window()
        logical = self._admit(batch)
        return execute(self.plan(logical.rows), self._task(), logical)

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
        self._open = Window(self, task, Run(self._window_plan, task, OpenBatch(), task.loss))
        return self._open

    def plan(self, rows: int) -> Plan:
        """How a batch of this many rows will be cut.

        A batch shorter than a micro-batch is refused, unless a longer one came before: then it is the short tail of
        an epoch and goes through uncut.
        """
        self._most_rows = max(self._most_rows, rows)
        micro_batch = rows if self.micro_batch is None else self.micro_batch
        if rows < micro_batch <= self._most_rows:
            micro_batch = rows
        shared = self._window_plan
        return Plan(
            rows=rows,
            micro_batch=micro_batch,
            clip_norm=shared.clip_norm,
            accumulate=shared.accumulate,
            compensated=shared.compensated,
        )

    def _task(self) -> Task:
        """Loss, parameters and gradients are read anew: callers unfreeze layers and change settings between steps."""
        owned = [p for o in self.optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]
        if not owned:
            raise OptimizerError(
                f"Expected at least one trainable parameter in the optimizer, got {len(owned)}: all are frozen. "
                "Set requires_grad=True on what is to be trained."
            )
        known = set(owned)
        return Task(
            model=self.model,
            loss=resolve(self.loss),
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            parameters=owned,
            others=[p for p in self.model.parameters() if p.requires_grad and p not in known],
            listeners=self.listeners,
        )

    def _admit(self, batch: Any) -> Batch:
        """Check a batch at the door, before anything is touched."""
        if self.collate is not None:
            return SampleBatch(batch, self.collate)
        logical = TensorBatch(batch)
        if isinstance(resolve(self.loss), SummedLoss):  # otherwise the caller's function may move rows itself
            devices = {parameter.device for parameter in self.model.parameters()}
            strange = {leaf.device for leaf in logical.leaves} - devices
            if strange and devices:
                raise BatchError(
                    f"Expected the batch on the model's device {_names(devices)}, got {_names(strange)}. Move the batch there "
                    "with .to(device), or write the loss as a function (model, micro) that moves each micro-batch."
                )
        return logical

    def _refuse_open_window(self) -> None:
        if self._open is not None:
            raise WindowError(
                f"Expected no open window, got one with {self._open.rows} rows. Call close() on it for the update, "
                "or discard() to drop its gradients."
            )

    def _release(self) -> None:
        self._open = None


class Window:
    """The stretch from one update to the next, for callers who bring micro-batches themselves.

    Three phases: `add` (forward and backward) for each micro-batch, `update`, `clear`. `close` is the last two. As a
    context manager it closes at the end, and discards when an exception leaves the block.

    A micro-batch that is refused or fails in its forward leaves the window as it was before it. One that fails half-way through its
    backward discards the window, because half of it is in the sum already: everything is as before the window.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with step.window() as window:
        ...     window.add((torch.zeros(3, 2), torch.zeros(3, 1)))
    """

    def __init__(self, step: Step, task: Task, run: Run) -> None:
        self._step, self._task, self._run = step, task, run
        self._phase = "open"
        self.rows = 0

    def add(self, micro: Any) -> None:
        """Forward, backward, accumulate one micro-batch.

        Args:
            micro: the rows of one micro-batch, of the same form as a batch.

        Raises:
            WindowError: the window is not open any more.
            BatchError, LossError: see `Step.__call__`.
        """
        self._expect("open", "add a micro-batch")
        batch = self._step._admit(micro)
        before = Before(self._task)
        try:
            self._run.add(next(batch.cut(batch.rows)), self._task.loss, batch.rows)
        except BaseException:
            if self._run.is_torn:
                self.discard()
            else:
                before.put_back()
            raise
        self.rows += batch.rows

    def update(self) -> StepReport:
        """Divide, clip, update optimizers and schedulers; gradients stay to be looked at until `clear`.

        Raises:
            WindowError: nothing was added, or the window is not open any more.
        """
        self._expect("open", "update")
        if not self.rows:
            raise WindowError(f"Expected at least one micro-batch in the window, got {self.rows} rows. Call add() first, or discard().")
        try:
            report = self._run.update()
        except BaseException:
            self.discard()
            raise
        self._phase = "updated"
        return report

    def clear(self) -> None:
        """Drop the gradients; the window is over.

        Raises:
            WindowError: no update was made yet.
        """
        self._expect("updated", "clear")
        self._run.clear()
        self._end()

    def close(self) -> StepReport:
        """Update and clear."""
        report = self.update()
        self.clear()
        for listener in self._task.listeners:
            listener(report)
        return report

    def discard(self) -> None:
        """Drop what was added; model, buffers, gradients and random state are as before the window."""
        if self._phase == "open":
            self._run.undo()
        elif self._phase == "updated":
            self._run.clear()
        self._end()

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
        elif self._phase == "open":
            self.close()

    def _expect(self, phase: str, wish: str) -> None:
        if self._phase != phase:
            raise WindowError(f"Expected a window that is {phase} to {wish}, got one that is {self._phase}. Open a new one with step.window().")

    def _end(self) -> None:
        if self._phase != "closed":
            self._phase = "closed"
            self._step._release()


def _check_optimizers(optimizer: object, model: nn.Module, loss: object) -> tuple[Optimizer, ...]:
    optimizers = tuple(cast("Sequence[object]", optimizer)) if isinstance(optimizer, list | tuple) else (optimizer,)
    owners: dict[nn.Parameter, int] = {}
    known = {*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())}
    for index, one in enumerate(optimizers):
        if not isinstance(one, Optimizer) or isinstance(one, LBFGS):
            raise OptimizerError(
                f"Expected a torch optimizer that updates from gradients, got {type(one).__name__}. "
                "LBFGS asks for the loss again and again within one update; use another one."
            )
        parameters: list[nn.Parameter] = [p for group in one.param_groups for p in group["params"]]
        if not known.intersection(parameters):
            raise OptimizerError(
                f"Expected optimizer {index} to hold parameters of the model, got {len(parameters)} that are none of its. "
                "Make the optimizer from model.parameters(), after the model was moved or wrapped."
            )
        shared = [p for p in parameters if owners.setdefault(p, index) != index]
        if shared:
            raise OptimizerError(
                f"Expected every parameter in one optimizer, got {len(shared)} in optimizers {owners[shared[0]]} and {index}. "
                "Each update would be made twice; give each parameter to one of them."
            )
    if not optimizers:
        raise OptimizerError(f"Expected an optimizer, got {optimizer!r}. Pass torch.optim.SGD(model.parameters(), lr=...) or another.")
    return cast("tuple[Optimizer, ...]", optimizers)


def _check_schedulers(scheduler: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    schedulers = tuple(cast("Sequence[object]", scheduler)) if isinstance(scheduler, list | tuple) else (scheduler,)
    for one in schedulers:
        if not isinstance(one, LRScheduler) or hasattr(one, "mode_worse"):
            raise OptimizerError(
                f"Expected a scheduler that steps once per update, got {type(one).__name__}. "
                "ReduceLROnPlateau waits for a metric: step it yourself after validation."
            )
        if not any(one.optimizer is optimizer for optimizer in optimizers):
            raise OptimizerError(f"Expected {type(one).__name__} to schedule an optimizer of this step, got another one. Make it from the same optimizer.")
    return cast("tuple[LRScheduler, ...]", schedulers)


def _names(devices: set[torch.device]) -> str:
    return ", ".join(sorted(str(device) for device in devices))
