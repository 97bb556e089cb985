"""Task: model, loss, optimizers and batch, checked, and gathered anew if they change."""

import warnings
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch import core
from anybatch.batchnorm import BatchNorm, frozen_batch_norms
from anybatch.core import torch_private as private, tree
from anybatch.engine.gradients import is_own_hook
from anybatch.engine.network import Network
from anybatch.engine.plan import Plan
from anybatch.engine.strategy import Strategy
from anybatch.engine.update import check_optimizers, check_schedulers, owned
from anybatch.losses import Loss, SummedLoss, WholeBatch, check_loss, module_of, resolve, summed_loss
from anybatch.precision import LossScale, Masters, Precision
from anybatch.recompute import apply_policies
from anybatch.state import Effects, Reachable

BeforeCut = Callable[["Task", core.Batch, Plan, int], None]


class Reader:
    """Reads what micro-batches and the update cost. This one reads nothing: override what is needed.

    What fails is told to `close`; then a micro-batch may begin again.
    """

    def begin_first(self, rows: int) -> None:
        """Note that the loss over so many rows is about to be computed, from the outputs of a first pass."""

    def first_done(self) -> None:
        """Note that it is, if it was; what is left of it stays until the step ends."""

    def begin(self, micro: core.Micro, held: int) -> None:
        """Note that a micro-batch begins; the gradient sums hold `held` bytes."""

    def forward_done(self) -> None:
        """Note that its loss is computed."""

    def done(self) -> None:
        """Note that its gradients are in the sums."""

    def begin_update(self) -> None:
        """Note that the optimizers are about to be stepped."""

    def update_done(self) -> None:
        """They have been."""

    def close(self) -> None:
        """Drop what has begun and is not done."""


_OFTEN = 256


def is_due(update: int, every: int = _OFTEN) -> bool:
    """Return True for updates 1, 2, 4 ... 256 and every 256th one after, and every so-many-th.

    All that a training looks at now and then it looks at in these.

    Example:
        >>> [update for update in range(1, 1000) if is_due(update)]
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768]
    """
    return not (update % every and update % _OFTEN and update & update - 1)


class Progress:
    """Counts of a step: updates made so far, its schedulers' steps, and when the present one began."""

    def __init__(self) -> None:
        self.updates, self.began = 0, perf_counter()
        self.begun = 0  # updates, made or not
        self.compared = 0  # the last one whose loss was that of all rows
        self.is_due = True  # this one is of the calendar
        self.has_cut = False  # one was cut
        self.forget()
        self._epochs: Sequence[int] = ()  # of the schedulers, after the last update
        self._has_warned = False

    def forget(self) -> None:
        """Forget what the last update found out."""
        self.unchecked = ""  # why a few rows could not show that the cut does not matter
        # Called before the update with the rows of each micro-batch and, in one process, the report of what
        # was added up; it raises where none is to be made.
        self.judge: Callable[[Sequence[int], core.StepReport | None], object] | None = None

    def note(self, schedulers: Sequence[LRScheduler]) -> None:
        """Note that the schedulers were stepped."""
        self._epochs = [*map(_epoch_of, schedulers)]

    def warn_of_other_steps(self, schedulers: Sequence[LRScheduler]) -> None:
        """Warn, once, where somebody else has stepped a scheduler since."""
        pairs = zip(schedulers, self._epochs, strict=False)
        if not self._has_warned and any(_epoch_of(one) == epoch + 1 for one, epoch in pairs):
            self._has_warned = True
            warnings.warn(
                "Expected the Step alone to step the scheduler that it was given, got one that was stepped "
                "between two updates as well: the learning rate moves twice. Leave out your own "
                "scheduler.step(), or Options(scheduler=...) of the Step.",
                stacklevel=4,
            )


def _epoch_of(scheduler: Any) -> int:
    return getattr(scheduler, "last_epoch", 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """The parts that a plan is carried out on."""

    model: nn.Module
    loss: Loss
    network: Network  # the modules and parameters of both
    optimizers: Sequence[Optimizer]  # updated in this order
    schedulers: Sequence[LRScheduler]  # stepped once per update, after the optimizers
    # called with this task, the batch, its plan and a number of rows that may fit, before a batch that was
    # not to be cut is cut after all; raises where that would change the result
    before_cut: BeforeCut = lambda task, batch, plan, rows: None
    effects: Effects = field(default_factory=Effects)  # what forwards have been seen to change
    # the float32 weights of parameters that are stored short
    masters: Masters = field(default_factory=Masters)
    scale: LossScale = field(default_factory=lambda: LossScale(Precision()))
    strategy: Strategy = field(default_factory=Strategy)
    progress: Progress = field(default_factory=Progress)  # what the step counts
    callbacks: core.Callbacks = field(default_factory=core.Callbacks)
    reader: Reader | None = None
    # of a comparison: divide at the end, from a provisional divisor times this; 0 in a step
    guess: float = 0.0

    def aside(self) -> "Task":
        """Return the same, for steps that do not count."""
        changes: dict[str, Any] = {"progress": Progress(), "schedulers": (), "callbacks": core.Callbacks()}
        return replace(self, scale=self.scale.copy(), **changes).alone()

    def alone(self) -> "Task":
        """Return the same, for this process only: other ranks take no part."""
        loss = replace(self.loss, ranks=None) if isinstance(self.loss, WholeBatch) else self.loss
        return replace(self, strategy=Strategy(), loss=loss) if self.strategy.is_many else self

    def is_synced(self, plan: Plan) -> bool:
        """Return True if rows of all ranks meet in a SyncBatchNorm, so that no forward may run twice."""
        is_many = self.strategy.is_many and plan.batch_norm is None
        return is_many and self.network.is_synced

    def names(self) -> dict[nn.Parameter, str]:
        """Return the trained parameters and their names in the model; positions where the loss holds them."""
        names = {one: private.plain_name(name) for name, one in self.model.named_parameters()}
        return {
            one: names.get(one, f"parameter {index}") for index, one in enumerate(self.network.parameters)
        }


def check_parts(
    model: object, loss: object, optimizer: object, scheduler: object
) -> tuple[tuple[Optimizer, ...], tuple[LRScheduler, ...]]:
    """Refuse parts that do not belong together; optimizers and schedulers as tuples.

    Raises:
        PlanError, LossError, OptimizerError: what is wrong with them.
    """
    if not isinstance(model, nn.Module):
        raise core.PlanError(
            f"Expected the model to be a torch.nn.Module, got {core.kind_of(model)}. Call a class to make "
            "one; wrap a function in a module."
        )
    if isinstance(loss, nn.Module) and summed_loss(model) is not None:
        raise core.PlanError(
            f"Expected the model, then the loss, got {core.kind_of(model)} and {core.kind_of(loss)}. Swap "
            "them."
        )
    check_loss(loss)
    known = {*model.parameters(), *module_of(loss).parameters()}
    optimizers = check_optimizers(optimizer, known)
    tables = [table for one in model.modules() for table in private.hooks_of_module(one)]
    hooked = [getattr(hook, "__self__", None) for table in tables for hook in table.values()]  # as of K-FAC
    if found := [one for one in optimizers if one in hooked or hasattr(type(one), "grad_samples")]:
        raise core.OptimizerError(
            f"Expected an optimizer that reads nothing but `.grad`, got {type(found[0]).__name__}, which "
            "also reads what each forward leaves: that of the last micro-batch alone. Use another one."
        )
    strange = [p for p in owned(optimizers) if p not in known]
    if strange:  # but those in closures of the loss are trained
        reached = {id(one) for one in Reachable([model, loss], has_classes=False).values}
        strange = [p for p in strange if id(p) not in reached]
    if strange:
        warnings.warn(
            f"Expected optimizers of parameters of the model or the loss, got {len(strange)} of neither. "
            "The step computes no gradient for them. Leave them out, or make the optimizer from "
            "model.parameters() again.",
            stacklevel=5,
        )
    return optimizers, check_schedulers(() if scheduler is None else scheduler, optimizers)


def gather(
    model: nn.Module,
    loss: object,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    *,
    held: Sequence[nn.Parameter] = (),
    **others: Any,
) -> Task:
    """Read all parts of a step: callers unfreeze layers and change settings between steps.

    `held` are the parameters to train, by default those of the optimizers; `others` go into the task.

    Raises:
        OptimizerError: there is nothing to train, or the model's parameters were replaced.
    """
    if optimizers:  # moved to another kind of device, a model has new parameters
        check_optimizers(optimizers, {*model.parameters(), *module_of(loss).parameters()})
    held = held or owned(optimizers)
    trainable = [p for p in held if p.requires_grad]
    if not trainable:
        raise core.OptimizerError(
            f"Expected at least one trainable parameter in the optimizer, got {len(held)} that are all "
            "frozen. Set requires_grad=True on what is to be trained."
        )
    resolved = resolve(loss)
    network = Network.of(model, loss, held, is_mixed=resolved.divided)
    parts: Any = {"optimizers": optimizers, "schedulers": schedulers, **others}
    task = Task(model=model, loss=resolved, network=network, **parts)
    if isinstance(resolved, WholeBatch) and task.strategy.is_many:
        return replace(task, loss=replace(resolved, ranks=task.strategy))
    return task


def refuse_hooks(task: Task) -> None:
    """Refuse parameters with hooks that run once a gradient is accumulated, as optimizers in backward do.

    Raises:
        OptimizerError: one was found. It runs in every micro-batch, and nothing can undo it.
    """
    found = private.hooks_after_accumulation([*task.network.parameters, *task.network.reached])
    if strange := [one for one in found if not is_own_hook(one)]:
        name = getattr(strange[0], "__qualname__", type(strange[0]).__name__)
        raise core.OptimizerError(
            f"Expected parameters without hooks that run after their gradient is accumulated, got {name}: it "
            "would run in every micro-batch, on a part of the gradient, and cannot be undone. Remove it with "
            "handle.remove(), and let the Step alone call the optimizer."
        )


def context(plan: Plan, task: Task) -> AbstractContextManager[object]:
    """Set what holds throughout a step: arithmetic switches, frozen BatchNorms, policies of blocks."""
    norms = task.network.batch_norms if plan.batch_norm == "frozen" else ()
    precision = plan.precision
    if norms or plan.blocks or precision.is_short or precision.compute == "tf32":
        return _context(plan, task, norms)
    return _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _context(plan: Plan, task: Task, norms: Sequence[BatchNorm]) -> Generator[None]:
    policies = apply_policies(task.model, plan.blocks, verify=task.effects.is_looking)
    with plan.precision.arithmetic(), frozen_batch_norms(norms), policies:
        yield


class Signature:
    """The objects that a task was gathered from, by identity: cheap to compare.

    Noticed are other submodules, parameters, attributes' counts, trained parameters, dtypes, devices, modes
    of BatchNorm, and settings of the loss. Looking steps gather anew in any case.
    """

    def __init__(self, task: Task, loss: object) -> None:
        self._optimizers, self._others = task.optimizers, task.network.others
        self._held = () if task.optimizers else task.network.parameters
        modules = task.network.modules
        self._norms = [module for module in modules if isinstance(module, BatchNorm)]
        tables: list[Any] = [*map(private.children_of, modules), *map(private.parameters_of, modules)]
        self._attributes = [*map(vars, modules)]
        if isinstance(loss, nn.Module):
            tables += [vars(loss), private.buffers_of(loss)]
        elif isinstance(loss, partial):
            tables.append(loss.keywords)
        self._values = [table.values for table in tables]  # those of TorchScript are no dicts
        self._found: tuple[list[Any], list[Any]] | None = None
        self.is_current()

    def is_current(self) -> bool:
        """Return True if all is as it was when this was first called."""
        held = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
        held += self._held
        values = [*chain.from_iterable(map(call, self._values)), *held]
        plain = [
            *map(_kind, held),
            *map(_wants, self._others),
            *map(_training, self._norms),
            *map(len, self._attributes),
        ]
        found, known = self._found = self._found or (values, plain)
        return plain == known and len(values) == len(found) and all(map(is_, values, found))


_kind = attrgetter("requires_grad", "dtype", "device")
_training = attrgetter("training")
_wants = attrgetter("requires_grad")


def admit(batch: Any, task: Task, collate: core.Collate | None, *, anywhere: bool = False) -> core.Batch:
    """Check a batch, before anything is touched; `anywhere` where only its shapes matter, not its device.

    Raises:
        BatchError: it cannot be cut, or is not where the model is.
    """
    if task.strategy.is_many and _is_empty(batch):
        return core.NoRows()
    logical = core.batch_of(batch, collate)
    # Where the loss is the caller's own function, that may move rows itself.
    if isinstance(task.loss, SummedLoss) and not anywhere:
        known = task.network.devices
        strange = {leaf.device for leaf in logical.leaves} - known
        if strange and known:
            advice = (
                "Move the batch there with .to(device), or write the loss as a function (model, micro) that "
                "moves each micro-batch."
            )
            if any(device.type == "meta" for device in known):
                advice = (
                    'To plan, name the device to plan for, as in device="cpu" or --device cpu; to run the '
                    "model, give it real weights, as in model.to_empty(device=...)."
                )
            raise core.BatchError(
                f"Expected the batch on the model's device {_names(known)}, got {_names(strange)}. {advice}"
            )
    return logical


def _is_empty(batch: Any) -> bool:
    """Return True if a rank has brought no rows: None, no samples, or tensors of none."""
    if batch is None or (isinstance(batch, list | tuple) and not batch):
        return True
    leaves = tree.flatten(batch, keeps=True).leaves if not isinstance(batch, list) else ()
    return bool(leaves) and all(leaf.dim() and not len(leaf) for leaf in leaves)


def _names(devices: Set[torch.device]) -> str:
    return ", ".join(sorted(str(device) for device in devices))
