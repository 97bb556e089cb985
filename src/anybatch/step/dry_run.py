"""Show the gradients of a batch without an update: everything is put back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from anybatch.core import Batch, Micro, SampleBatch
from anybatch.engine import Observer, Task, admit, carry_out
from anybatch.precision import LossScale, Precision
from anybatch.state import Effects, ObjectState

See = Callable[[Tensor], object]


def reached_by(task: Task, batch: Batch) -> ObjectState:
    """All that a run reaches; the task's own parameters and buffers are put back otherwise."""
    collate = (batch.collate,) if isinstance(batch, SampleBatch) else ()
    known = [p for module in task.modules for p in (*module.parameters(), *module.buffers())]
    return ObjectState([task.model, task.loss, *task.modules, *collate], but_for=known)


class _Shown(Observer):
    """Calls a function with each gradient of each micro-batch."""

    wants_micro = True

    def __init__(self, see: See) -> None:
        self._see = see

    def micro(self, micro: Micro, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        for several in gradients.values():
            for gradient in several:
                self._see(gradient.detach())


def show_gradients(
    step: Any,
    batch: Any,
    see: See,
    *,
    precision: Precision,
    scale: float = 1.0,
    micro_batch: int | None = None,
) -> None:
    """Send a batch through a step's model and loss, and show each gradient before it is added to the others.

    They are parts of the gradient of the whole batch's loss. What is not finite is shown, too. No update is
    made: model, buffers, gradients, optimizers, random streams and what else a forward reaches are as before,
    and a window that is open goes on.

    Args:
        step: an `anybatch.Step`.
        batch: as for the step; its tensors are copied, because a model may write to them.
        see: called with the gradient of a parameter, once for each micro-batch and for each term of the loss
            whose divisor is not known beforehand; in the parameter's dtype, times the scale.
        precision: in which is computed; the weights stay stored as they are.
        scale: what the loss is multiplied by, a power of two.
        micro_batch: rows that go through together; None for the step's own, or all where it has none.

    Raises:
        BatchError: the batch cannot be cut, or is not where the model is.
        PlanError: rows meet in the model, so the batch must not be cut, or the scale is no power of two.
    """
    fixed = LossScale(Precision(loss_scale=scale))
    effects = Effects()
    task = replace(
        step.task().alone(),
        scale=fixed,
        effects=effects,
        schedulers=(),
        listeners=(),
        observers=(_Shown(see),),
    )
    effects.begin(task.modules)
    logical = admit(batch, task, step.collate).copied()
    size = min(logical.rows, micro_batch or step.micro_batch or logical.rows)
    settings = step.planning.settings
    plan = replace(settings, rows=logical.rows, micro_batch=size, precision=precision)
    if plan.is_cut:
        step.guard.refuse_meetings(task)
    noted = reached_by(task, logical)
    try:
        carry_out(plan, task, logical, is_dry=True)
    finally:
        noted.put_back()


def show(step: Any, batch: Any, observer: Observer) -> None:
    """Show the gradient of a whole batch to an observer, cut as the step would cut it; nothing is changed.

    Args:
        step: an `anybatch.Step` made for this alone: it learns what fits.
        batch: as for the step; its tensors are copied.
        observer: sees what a step's observers see before the update. What is not finite is shown, too.

    Raises:
        AnybatchError: as from a step.
    """
    effects = Effects()
    task = replace(step.task().alone(), effects=effects, schedulers=(), listeners=(), observers=(observer,))
    effects.begin(task.modules)
    logical = admit(batch, task, step.collate).copied()
    noted = reached_by(task, logical)
    try:
        plan, running = step.planning.of(task, logical, step.guard)
        if plan.is_cut:
            step.guard.before_cut(task, logical, plan, plan.micro_batch)
        with step.planning.enforced(task):
            carry_out(plan, running, logical, is_dry=True)
    finally:
        noted.put_back()
