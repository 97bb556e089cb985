"""The front door: one exact optimizer step per logical batch, however it is cut."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batchnorm import BatchNormChoice
from anybatch.core import BlockError, Collate, Listener, OutOfMemoryError, StepReport, WindowError, counted
from anybatch.engine import (
    Observer,
    Plan,
    Progress,
    Signature,
    Single,
    Strategy,
    Task,
    admit,
    carry_out,
    check_parts,
    gather,
    owned,
)
from anybatch.losses import module_of, resolve
from anybatch.parallel import StrategyName, check_strategy, refuse_ranks
from anybatch.planner import PlanReport, single_rows
from anybatch.precision import NonFinitePolicy, Precision, PrecisionName, at_work, find_precision
from anybatch.recompute import Asked, choose_blocks
from anybatch.state import Effects
from anybatch.step.decide import Guard, Planning, whole_number
from anybatch.step.dry_run import show_gradients
from anybatch.step.window import ReadOnly, Window


class Step(ReadOnly):
    """Takes the whole logical batch and does exactly one exact optimizer step.

    The result does not depend on the cut: micro-batches of any size give the gradient of the whole batch, up
    to the order of additions. Uncut and with default options it is, bit for bit, the loop
    `loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()`.

    Where memory runs out in a micro-batch, its rows come again in parts of half the size, and so do those
    that follow; the result is that of the same cut without the fault. The next steps begin at what fitted.

    Where rows meet inside the model no cut is exact. BatchNorm in training mode is refused in a batch that is
    cut, unless `batch_norm` says what is to be done; `anybatch.check` finds every other meeting. Dropout
    draws its masks micro-batch by micro-batch, as with any gradient accumulation.

    Args:
        model: called on each micro-batch.
        loss: a loss of torch as a module, function or `functools.partial`; a function
            `(model, micro) -> ab.Total` or a mapping of named totals; `ab.Terms`; `ab.WholeBatch`, for a loss
            over the outputs of all rows; or `ab.ModelLoss`, for a model that computes its own.
        optimizer: a torch optimizer, or several that share no parameter.
        micro_batch: rows that go through the model together; None for the whole batch at once, or for what
            fits the memory budget. A batch of fewer rows goes through uncut.
        memory: budget of bytes: "12GB", "2GiB", "80%" of the device, "auto" for what is free, or a number.
            The fastest plan within it is chosen for each shape of rows; None for no budget.
        recompute: blocks of the model that are run again in backward rather than kept: "all", "selective",
            "offload", patterns of module names, or a mapping from pattern to one of these policies. None for
            none, or for what fits the budget.
        clip_norm: largest 2-norm of the gradient, clipped once on the whole batch's gradient; None for none.
        scheduler: learning-rate scheduler, or several; stepped once per update; None for none.
        collate: if given, a batch is a list of samples, and this builds the tensors of each micro-batch.
        accumulate: dtype of gradient sums; None for float32 or the parameter's if wider.
        compensated: Kahan summation of gradients, at one more buffer per parameter.
        batch_norm: what BatchNorm in training mode does: None refuses more than one micro-batch; "micro"
            takes the statistics of each micro-batch, so the result depends on the cut; "frozen" takes the
            running statistics and leaves them as they are, cut or not.
        precision: "float32" for everything as it is, "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true",
            "tf32", or an `ab.Precision`. The true ones store the model's weights short, from now on.
        non_finite: what becomes of a micro-batch whose loss or gradient is not finite: "raise" stops and
            names its rows, "drop" leaves its rows and their weight out, "skip" makes no update.
        check: before the first batch of its kind is cut, compare loss and gradient of a few of its rows
            between several cuts (`anybatch.step.look`).
        listeners: functions called with every event: `MicroBatchDone`, `MicroBatchRedone`, `StepReport`.
        observers: look at the finished gradients of each update, and change nothing
            (`anybatch.engine.Observer`).
        strategy: "single" refuses a process group of more than one rank; "local" lets each rank make its own
            updates, and synchronising is left to the caller. Wrapped models (DistributedDataParallel, FSDP)
            are refused in any case.

    Attributes, which are all read-only but `micro_batch`:
        planning: what was decided about batches so far, and what memory has taught.
        guard: what must hold before a batch is cut.
        open_window: the window that is not yet over, or None.
        working: the precision, the float32 weights behind short ones (also `masters`) and the loss `scale`.

    Raises:
        PlanError, LossError, OptimizerError: a choice that cannot be carried out, at once. A warning tells of
            parameters of neither model nor loss in an optimizer, and of a scheduler that is stepped twice.

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
        memory: str | int | None = None,
        recompute: Asked = None,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        collate: Collate | None = None,
        accumulate: torch.dtype | None = None,
        compensated: bool = False,
        batch_norm: BatchNormChoice | None = None,
        precision: PrecisionName | Precision = "float32",
        non_finite: NonFinitePolicy = "raise",
        check: bool = True,
        listeners: Sequence[Listener] = (),
        observers: Sequence[Observer] = (),
        strategy: StrategyName = "single",
    ) -> None:
        self.model, self.loss = model, loss
        self.optimizers, self.schedulers = check_parts(model, loss, optimizer, scheduler)
        check_strategy(strategy)
        refuse_ranks([*model.modules(), *module_of(loss).modules()], strategy)
        chosen = find_precision(precision)
        sums_in = chosen.accumulate if accumulate is None else str(accumulate).removeprefix("torch.")
        settings = Plan(
            rows=0,
            micro_batch=0,
            clip_norm=math.inf if clip_norm is None else clip_norm,
            accumulate=sums_in or "auto",
            compensated=compensated,
            batch_norm=batch_norm,
            blocks=choose_blocks(model, recompute),
            precision=chosen,
            non_finite=non_finite,
        )
        self.planning = Planning(
            settings, micro_batch=micro_batch, memory=memory, may_choose_blocks=recompute is None
        )
        self.guard = Guard(batch_norm=batch_norm, check=check)
        self.collate = collate
        self.listeners, self.observers = tuple(listeners), tuple(observers)
        self.strategy: Strategy = Single()
        self.effects = Effects()
        self.open_window: Window | None = None
        self._ranks: StrategyName = strategy
        self._progress = Progress()
        self._gathered: tuple[Task, Signature] | None = None
        self.working = at_work(model, chosen, self.optimizers)  # last: a refusal changes nothing
        self.precision, self.masters, self.scale = chosen, self.working.masters, self.working.scale
        self._is_made = True

    def __call__(self, batch: Any) -> StepReport:
        """One forward and backward per micro-batch, one update.

        If anything fails before the update, all is as it was. What fails after it (a scheduler past its end,
        a listener) leaves the update made; what fails inside an optimizer's `step()` cannot be undone.

        Args:
            batch: `(inputs, target)`, `(a, b, ..., target)` or a mapping with a target for torch's losses;
                any nesting of tensors with rows first for your own; a list of samples with a `collate`.

        Returns:
            What happened, as floats and counts.

        Raises:
            BatchError, PlanError, LossError, OptimizerError, WindowError: see `anybatch.core.errors`.
            OutOfMemoryError: not even one row fits, or a smaller cut would change the result.
        """
        self._refuse_open_window()
        task = self._begun()
        logical = admit(batch, task, self.collate)
        while True:
            plan = self.planning.of(task, logical)
            if plan.is_cut:
                self.guard.before_cut(task, logical, plan, plan.micro_batch)
            try:
                with self.planning.enforced(task):
                    report = carry_out(plan, task, logical)
            except BlockError as error:
                if not self.planning.distrust(error.block, plan):  # it was asked for by name
                    raise
                continue
            except BaseException as error:
                self.strategy.abandon(error)
                if isinstance(error, OutOfMemoryError):
                    error.ledger = error.ledger or single_rows(task, logical, self.planning.settings)
                raise
            self.planning.learn(logical, plan, failed=report.too_large, seconds=report.seconds)
            return report

    def foresee(
        self,
        batch: Any,
        *,
        memory: str | int | None = None,
        rows: int | None = None,
        device: str | torch.device | None = None,
        measure: bool = True,
    ) -> PlanReport:
        """What a step on this batch would do and cost; nothing is changed. See `anybatch.plan`.

        Args:
            batch: as for a step, or a few of its rows.
            memory: another budget than the step's own.
            rows: of the logical batch; None for those of `batch`.
            device: another one than the model's.
            measure: race the fastest plans, rather than estimating seconds.

        Raises:
            BudgetError: nothing fits.
        """
        task = self.task()
        logical = admit(batch, task, self.collate, anywhere=device is not None)
        wanted = self.planning.foresee
        report = wanted(task, logical, memory=memory, rows=rows, device=device, measure=measure)
        if report.plan.is_cut:
            self.guard.refuse_meetings(task)
        return report

    def show_gradients(
        self,
        batch: Any,
        see: Callable[[Tensor], object],
        *,
        precision: Precision,
        scale: float = 1.0,
        micro_batch: int | None = None,
    ) -> None:
        """Show each gradient that a batch gives; nothing is changed. See `anybatch.step.dry_run`."""
        show_gradients(self, batch, see, precision=precision, scale=scale, micro_batch=micro_batch)

    def window(self, state: Mapping[str, Any] | None = None) -> Window:
        """Open a window for a loop that brings micro-batches itself.

        Weights of the whole batch are not known beforehand, so the gradient is divided once, at the end.

        Args:
            state: of a window that was saved half-way (`Window.state`), which goes on from there; restore
                model, optimizer and random streams first. None for an empty one.

        Raises:
            CheckpointError: the state is of another model, loss or precision; nothing was changed.

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
        task = self._begun()
        opened = vars(self)["open_window"] = Window(self, task, state)
        return opened

    @property
    def loss_module(self) -> nn.Module:
        """The module the loss is or holds, an empty one if none: its parameters may be trained too."""
        return module_of(self.loss)

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The factor of each named term in the loss, 1 where none is given."""
        return resolve(self.loss).coefficients

    def plan(self, rows: int, like: Hashable = ()) -> Plan:
        """How a batch of this many rows will be cut.

        A batch of fewer rows than a micro-batch goes through uncut. Where memory has run out in rows of this
        kind before, micro-batches are smaller.

        Args:
            rows: rows of the batch.
            like: what its rows are like (`Batch.like`).
        """
        return self.planning.by_rows(rows, like)

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch, as asked for; may be set to what `Step(...)` takes."""
        return self.planning.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int | None) -> None:
        self.planning.micro_batch = whole_number(rows)

    def __repr__(self) -> str:
        trained = [p for p in owned(self.optimizers) if p.requires_grad and not is_lazy(p)]
        parts = [self.model, self.loss, *self.optimizers]
        names = [getattr(one, "__name__", type(one).__name__) for one in parts]
        memory = None if self.planning.budget is None else self.planning.budget.memory
        return (
            f"Step({', '.join(names)}, {sum(p.numel() for p in trained):,} trained parameters, "
            f"micro_batch={self.micro_batch}, memory={memory!r}, precision={str(self.precision)!r}, "
            f"{counted(self._progress.updates, 'update')} made)"
        )

    def _begun(self) -> Task:
        """The parts of the next step, gathered anew where they have changed, and in looking steps."""
        if self.schedulers:
            self._progress.warn_of_other_steps(self.schedulers)
        known = self._gathered
        if known is None or self.effects.looks_next or not known[1].is_current():
            task = self.task()
            refuse_ranks(task.modules, self._ranks)
            known = self._gathered = task, Signature(task, self.loss)
        self.effects.begin(known[0].modules)
        return known[0]

    def task(self) -> Task:
        """The parts of a step, gathered and checked."""
        return gather(
            self.model,
            self.loss,
            self.optimizers,
            self.schedulers,
            self.listeners,
            before_cut=self.guard.before_cut,
            effects=self.effects,
            working=self.working,
            strategy=self.strategy,
            progress=self._progress,
            observers=self.observers,
        )

    def _refuse_open_window(self) -> None:
        if self.open_window is not None:
            raise WindowError(
                f"Expected no open window, got one with {self.open_window.rows} rows. Call close() on it for "
                "the update, or discard() to drop its gradients; it is `step.open_window`."
            )
