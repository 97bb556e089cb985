"""The step: one exact optimizer update per batch, for any size of the micro-batches."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch import core, engine, parallel
from anybatch.audit import NOTHING, Audit, Known
from anybatch.batchnorm import warn_of_untrained
from anybatch.core import torch_private as private
from anybatch.integrations import computes_in_float16
from anybatch.losses import LossLike, module_of, resolve
from anybatch.planner import PlanReport
from anybatch.precision import LossScale, Masters, Precision, PrecisionName, at_work, find_precision
from anybatch.recompute import choose_blocks
from anybatch.state import Effects
from anybatch.step.decide import NO_LIMIT, Planning, whole_number
from anybatch.step.length import in_order, noted
from anybatch.step.meetings import refuse_in_synced, refuse_meetings, warn_of_use
from anybatch.step.options import DEFAULT, Options, known_keywords
from anybatch.step.remote import Remote
from anybatch.step.state import load_state, state_of
from anybatch.step.window import OpenWindow, refuse_open, refuse_others

_UNCUT = 64  # updates without a cut after which a warning says so


class Step:
    """Splits a batch into micro-batches and makes one exact optimizer update.

    The update does not depend on the size of the micro-batches: the gradient is that of the whole batch, up
    to the order of additions. If the batch is not split and all options have their defaults, the result is
    bit for bit that of `loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()`.

    If memory runs out in a micro-batch, its rows and those after it are processed in micro-batches of half
    the size. The update stays exact. Later steps start with the size that fitted.

    A batch cannot be split exactly if the model mixes its rows. If BatchNorm is in training mode, a batch
    that would be split is refused, unless `Options(batch_norm=...)` says what to do. `anybatch.check` finds
    the other cases. Dropout draws its masks for each micro-batch, as in any gradient accumulation.

    Args:
        model: called on each micro-batch.
        loss: a loss of torch as a module, function or `functools.partial`; a function
            `(model, micro)` that returns an `ab.Total` or a mapping of named totals; `ab.Terms`;
            `ab.PerRow` for a function with a value for each row; `ab.Additive` for a sum divided beforehand;
            `ab.WholeBatch` for a loss over the outputs of all rows; `ab.ModelLoss` for a model, or a function
            of it, that computes a mean.
        optimizer: a torch optimizer, or several that share no parameter.
        micro_batch: rows per micro-batch. A smaller batch is not split. None for the whole batch, or, with
            `memory`, for what fits.
        memory: budget in bytes: a number, "12GB", "2GiB", "80%" of the device, or "auto" for what is free.
            Micro-batches are read, and the largest that fit are taken, or faster smaller ones. If not even
            one row fits, blocks are recomputed. With `micro_batch`, that size has to fit. None for no budget.
        clip_norm: largest 2-norm of the gradient of the whole batch. None for no clipping.
        collate: builds the tensors of a micro-batch from a list of samples. With it, a batch is such a list.
        precision: "float32" to compute in the dtypes as they are, "bf16-mixed", "fp16-mixed", "bf16-true",
            "fp16-true", "tf32", or an `ab.Precision`. The true ones convert the model's weights.
        callbacks: objects that look at steps (`ab.Callback`), and functions called with each `StepReport`.
        options: `anybatch.Options`, for all else: recompute, scheduler, order, accumulate, batch_norm,
            non_finite, check, strategy, clip_value.

    Attributes (read-only, except `micro_batch`):
        planning: chooses how batches are split, and remembers what did not fit.
        open_window: the window that is open, or None.
        working: the precision, the float32 copies of short weights (also `masters`) and the loss `scale`.

    Raises:
        PlanError, LossError, OptimizerError: an argument is not supported. Warns if an optimizer has
            parameters of neither model nor loss, and if a scheduler is also stepped elsewhere.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=4)
        >>> report = step((torch.randn(10, 3), torch.randint(2, (10,))))
        >>> report.rows, report.micro_batches, report.updated
        (10, 3, True)
    """

    @known_keywords()
    def __init__(
        self,
        model: nn.Module,
        loss: LossLike,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        micro_batch: int | None = None,
        memory: str | int | None = None,
        precision: PrecisionName | Precision = "float32",
        clip_norm: float | None = None,
        collate: core.Collate | None = None,
        callbacks: Iterable[core.CallbackLike] = (),
        options: Options = DEFAULT,
    ) -> None:
        strategy, chosen = options.strategy, find_precision(precision)
        group, model = parallel.group_of(model), parallel.unwrapped(model, strategy)
        self.model, self.loss, self.collate, self.options = model, loss, collate, options
        self.optimizers, self.schedulers = self._checked(model, loss, optimizer, options.scheduler)
        parallel.refuse_wrapped([*model.modules(), *module_of(loss).modules()], strategy)
        odd = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
        if options.clip_value is not None and odd:
            raise core.PlanError(
                f"Expected real parameters with clip_value={options.clip_value}, got the complex {odd[0]}. "
                "Its entries have no order: pass clip_norm=... instead."
            )
        self.strategy: engine.Strategy = parallel.choose_strategy(strategy, group, model)
        if chosen == Precision() and computes_in_float16(model):
            chosen = Precision(loss_scale="dynamic")  # autocast is in the model
        if self.strategy.is_lockstep and chosen.store is not None:
            raise core.PlanError(
                f"Expected float32 weights with a sharded model, got precision={str(chosen)!r}: its weights "
                'are not converted. For 16 bits use precision="bf16-mixed" or '
                "fully_shard(mp_policy=MixedPrecisionPolicy(...))."
            )
        if memory is not None and getattr(self.strategy, "hold", None):
            raise core.PlanError(
                f"Expected Shard() with memory={memory!r}, which holds gradients where they fit, got "
                "Shard(hold=True). Leave out one of both."
            )
        blocks = choose_blocks(model, options.recompute)
        self.planning = Planning(
            options.settings(clip_norm=clip_norm, blocks=blocks, precision=chosen),
            Audit(check=False if self.strategy.is_lockstep else options.check, is_bounded=memory is not None),
            micro_batch=micro_batch,
            memory=memory,
            may_choose_blocks=options.recompute is None,
        )
        self.callbacks = core.check_callbacks(callbacks)
        self.attach()
        self.effects = Effects()
        self.open_window: OpenWindow | None = None
        self.progress = engine.Progress()
        self._gathered: tuple[engine.Task, engine.Signature] | None = None
        self.working = at_work(model, chosen, self.optimizers)  # last: a refusal changes nothing

    def __call__(self, batch: Any, *others: Any) -> core.StepReport:
        """Run forward and backward for each micro-batch, then update once.

        An error before the update leaves everything as it was. An error after it (in a scheduler, in a
        callback) leaves the update in place. An error inside `optimizer.step()` cannot be undone.

        Args:
            batch: `(inputs, target)`, `(a, b, ..., target)` or a mapping with a target for torch's losses;
                any nesting of tensors with rows first for your own; a list of samples with a `collate`.

        Returns:
            The loss, the norm of the gradient and other figures of the update.

        Raises:
            BatchError, PlanError, LossError, OptimizerError, WindowError: see `anybatch.core.errors`.
            OutOfMemoryError: one row does not fit, or smaller micro-batches would change the result.
        """
        if others:
            refuse_others("step", others)
        if self.open_window is not None:
            refuse_open(self)
        try:
            task, token = self._begun(), core.running.set(True)
            try:
                return self._step(task, batch, self.end)
            finally:
                core.running.reset(token)
        except BaseException as error:  # also before a window has begun
            self.strategy.abandon(error)
            raise

    def sums_of(self, batch: Any, take: Callable[[engine.Sums], object]) -> core.StepReport:
        """Run forward and backward and hand the undivided sums over, without an update.

        Parameters, buffers and random streams are as before. Memory that runs out is handled as in a step.

        Args:
            batch: as for a step.
            take: called with the sums of all rows.
        """
        return self._step(self._begun(), batch, partial(engine.Window.give_sums, take=take))

    def end(self, window: engine.Window) -> core.StepReport:
        """End a window with the update."""
        with NO_LIMIT if self.planning.limit is None else self.planning.lifted():
            return window.write()

    def _step(
        self, task: engine.Task, given: Any, end: Callable[[engine.Window], core.StepReport]
    ) -> core.StepReport:
        planning, strategy, order = self.planning, self.strategy, self.options.order
        settings = planning.settings
        if strategy.is_many:
            strategy.begin(task, settings)
        batch = whole = engine.admit(given, task, self.collate)  # refused at the door
        if strategy.is_elsewhere:
            report = strategy.carry_out_elsewhere(task, batch, settings, partial(Remote.of, self))
            task.callbacks.tell(report)
            return report
        if not batch.rows:
            if task.is_synced(settings):
                strategy.meet(task, 0)
            return engine.carry_out(settings, task, batch, end)
        ordered = None if order is None else in_order(order, task, batch)
        batch = batch if ordered is None else ordered.batch
        while True:
            planned, running = planning.plan_for(task, whole)  # remembered; read where it is new
            plan = planned if ordered is None else ordered.cut(planned, is_asked=planning.is_asked)
            limit = NO_LIMIT if planning.budget is None else planning.enforced(task, whole)
            most = planned.micro_batch
            try:
                with limit, self._compared(task, batch, plan, most):
                    report = engine.carry_out(plan, running, batch, end)  # or all is as before
                break
            except core.BlockError as error:
                if not planning.distrust(error.block, planned):  # it was asked for by name
                    raise
        failed = ordered.failed(planned, report) if ordered else report.too_large
        if failed or planning.limits.known or planning.budget is not None:
            planning.learn(task, whole, most, failed)
        return report

    def _compared(
        self, task: engine.Task, batch: core.Batch, plan: engine.Plan, most: int
    ) -> AbstractContextManager[object]:
        """Refuse a plan under which rows meet; return the comparison of an update in which one is due.

        `most` rows are known to fit.
        """
        is_many = task.strategy.is_many
        if is_many and task.is_synced(plan):
            task.strategy.meet(task, plan.micro_batches)
            task.progress.unchecked = "rows of all ranks meet in SyncBatchNorm, and no rank has them all"
            return NOTHING
        if not (plan.is_cut or is_many or batch.order):
            if task.progress.begun == _UNCUT + 1 and not task.progress.has_cut:
                warn_of_use(self.options.check, self.planning)
            return NOTHING
        task.progress.has_cut = True
        if task.network.batch_norms:
            refuse_meetings(task, plan)
        audit = self.planning.audit
        is_due = audit.is_due(task, batch, plan, most)
        return audit(task, batch, plan, most, self.planning.room) if is_due else NOTHING

    def _recut(self, task: engine.Task, batch: core.Batch, plan: engine.Plan, rows: int) -> None:
        """Refuse to cut rows that were not to be cut and no longer fit, where that changes the result."""
        if task.network.batch_norms:
            refuse_meetings(task, plan)
        self.planning.audit.few(task, batch, plan, rows)

    def foresee(
        self,
        batch: Any,
        *,
        memory: str | int | None = None,
        rows: int | None = None,
        device: str | torch.device | None = None,
    ) -> PlanReport:
        """Plan a step on this batch, with its time and memory, without running it. See `anybatch.plan`.

        Args:
            batch: as for a step, or a few of its rows.
            memory: budget. None for the step's own.
            rows: rows of the logical batch. None for those of `batch`.
            device: device to plan for. None for the model's.

        Raises:
            BudgetError: nothing fits.
            PlanError: the step cannot be traced.
        """
        parallel.refuse_sharded(self.model, "a plan")
        task = self.task()
        logical = engine.admit(batch, task, self.collate, anywhere=device is not None)
        report = self.planning.foresee(task, logical, memory=memory, rows=rows, device=device)
        if report.plan.is_cut and task.network.batch_norms:
            refuse_meetings(task, report.plan)
        return noted(self.options.order, report)

    def window(self) -> OpenWindow:
        """Open a window, for a loop that provides the micro-batches itself.

        The size of the whole batch is not known beforehand, so the gradient is divided at the end.

        Example:
            >>> model = nn.Linear(3, 1)
            >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
            >>> window = step.window()
            >>> for rows in (4, 2):
            ...     window.add((torch.randn(rows, 3), torch.randn(rows, 1)))
            >>> window.close().rows
            6
        """
        refuse_open(self)
        if self.options.order is not None:
            raise core.WindowError(
                f"Expected whole batches with order={self.options.order!r}, got a window, whose rows are "
                "never all there. Call step(batch), or make a Step without order."
            )
        if self.strategy.is_elsewhere:
            raise core.WindowError(
                f"Expected whole batches with a {type(self.strategy).__name__}, got a window. Call "
                "step(batch), which cuts the batch into units for the workers."
            )
        try:
            opened = vars(self)["open_window"] = OpenWindow(self, self._begun())
        except BaseException as error:
            self.strategy.abandon(error)
            raise
        return opened

    @property
    def loss_module(self) -> nn.Module:
        """The loss as a module, or the module it holds; an empty module if there is none."""
        return module_of(self.loss)

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The factor of each named term in the loss, 1 where none is given."""
        return resolve(self.loss).coefficients

    def plan(self, rows: int, like: Hashable = ()) -> engine.Plan:
        """How a batch of this many rows will be split.

        Micro-batches are smaller if memory ran out in rows of this kind before.

        Args:
            rows: rows of the batch.
            like: the kind of its rows (`Batch.like`).
        """
        return self.planning.by_rows(rows, like)

    state_dict, load_state_dict = state_of, load_state

    @property
    def known(self) -> Known:
        """The comparisons so far, by kinds of rows. Print it to read it."""
        return self.planning.audit.known

    @property
    def precision(self) -> Precision:
        """The dtypes of the step."""
        return self.working.precision

    @property
    def masters(self) -> Masters:
        """The float32 copies of 16-bit weights."""
        return self.working.masters

    @property
    def scale(self) -> LossScale:
        """The loss scale."""
        return self.working.scale

    @property
    def micro_batch(self) -> int | None:
        """Rows per micro-batch, as requested. May be set."""
        return self.planning.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int | None) -> None:
        self.planning.micro_batch = whole_number(rows)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse what would have no effect: attributes are set by `Step(...)`."""
        if "working" in vars(self) and name[0] != "_" and name != "micro_batch":
            raise core.ReadOnlyError(
                f"Expected attributes of a Step to be only read, got a value for {name!r}. Make a new "
                "Step(...) with what is to be different; only `micro_batch` may be set."
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        trained = [p for p in engine.owned(self.optimizers) if p.requires_grad and not is_lazy(p)]
        parts = [self.model, self.loss, *self.optimizers]
        names = [getattr(one, "__name__", type(one).__name__) for one in parts]
        memory = None if self.planning.budget is None else self.planning.budget.memory
        return (
            f"Step({', '.join(names)}, {sum(p.numel() for p in trained):,} trained parameters, "
            f"micro_batch={self.micro_batch}, memory={memory!r}, precision={str(self.precision)!r}, "
            f"{core.counted(self.progress.updates, 'update')} made"
            f"{'' if self.open_window is None else f', {self.open_window!r}'})"
        )

    def _begun(self) -> engine.Task:
        """Return the parts of the next step, gathered anew if they have changed, and in looking steps."""
        if self.schedulers:
            self.progress.warn_of_other_steps(self.schedulers)
        if self.strategy.is_many:
            self.strategy.ready(self.model)
        known = self._gathered
        is_told = known is not None and known[0].callbacks is self._told
        progress, effects = self.progress, self.effects
        progress.begun += 1
        progress.is_due = engine.is_due(progress.begun, *self.planning.audit.every)
        progress.unchecked, progress.judge = "", None
        if known is None or not is_told or progress.is_due or not known[1].is_current():
            task = self.task()
            parallel.refuse_wrapped(task.network.modules, self.options.strategy)
            parallel.refuse_late_group(self.strategy, self.options.strategy)
            if known is None and self.options.batch_norm == "frozen":
                warn_of_untrained(task.model, task.network.batch_norms)
            if task.is_synced(self.planning.settings):
                has_budget = self.planning.budget is not None
                refuse_in_synced(task, self.planning.settings, has_budget=has_budget)
            known = self._gathered = task, engine.Signature(task, self.loss)
        if private.hooks_after_accumulation(known[0].network.everyone):
            engine.refuse_hooks(known[0])
        if progress.is_due or effects.is_looking:
            effects.begin(known[0].network.modules, looks=progress.is_due)
        return known[0]

    def attach(self, callbacks: Sequence[object] = (), *, first: core.Functions = ()) -> None:
        """Call the methods of these callbacks in steps, too, but for `update`; none to detach all.

        Args:
            callbacks: the callbacks.
            first: functions called with each report, before the step's own callbacks.
        """
        own, told = (core.Callbacks.of(ones) for ones in (self.callbacks, [*self.callbacks, *callbacks]))
        for attached in told.attached:
            attached(self)
        self._told = replace(told, update=(*first, *own.update))

    def task(self) -> engine.Task:
        """Return the parts of a step, gathered and checked."""
        return engine.gather(
            self.model,
            self.loss,
            self.optimizers,
            self.schedulers,
            before_cut=self._recut,
            effects=self.effects,
            masters=self.masters,
            scale=self.scale,
            strategy=self.strategy,
            progress=self.progress,
            callbacks=self._told,
            held=self.held(),
        )

    def held(self) -> Sequence[nn.Parameter]:
        """Return the parameters to train if no optimizer names them."""
        return ()

    def _checked(self, model: object, loss: object, optimizer: object, scheduler: object) -> Any:
        return engine.check_parts(model, loss, optimizer, scheduler)
