"""Backward passes of a step, tried out: each gradient is shown as it arrives, and nothing is changed."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from anybatch.core import Batch, SampleBatch, TensorBatch, tree
from anybatch.engine import Plan, Run, Task, conditions
from anybatch.precision import LossScale, Precision
from anybatch.state import ObjectState
from anybatch.step.admit import admit, gather

See = Callable[[Tensor], object]


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

    Example:
        >>> import torch
        >>> from anybatch.precision import find_precision
        >>> from anybatch.step import Step
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = Step(model, torch.nn.MSELoss(), optimizer, micro_batch=2)
        >>> shapes, batch = [], (torch.randn(4, 3), torch.randn(4, 1))
        >>> take, here = lambda seen: shapes.append(seen.shape), find_precision("float32")
        >>> show_gradients(step, batch, take, precision=here)
        >>> len(shapes), model.weight.grad
        (4, None)
    """
    fixed = LossScale(Precision(loss_scale=scale))
    task = gather(step.model, step.loss, step.optimizers, (), (), step.guard, step.working)
    task = replace(task, scale=fixed, streams=copy.copy(task.streams))  # the step's own go on as they were
    logical = _copied(admit(batch, task, step.collate))
    size = min(logical.rows, micro_batch or step.micro_batch or logical.rows)
    plan = replace(
        step.planning.settings,
        rows=logical.rows,
        micro_batch=size,
        precision=precision,
    )
    if plan.is_cut:
        step.guard.refuse_meetings(task)
    collate = () if step.collate is None else (step.collate,)
    own = [tensor for module in task.modules for tensor in (*module.parameters(), *module.buffers())]
    noted = ObjectState([task.model, task.loss, *task.modules, *collate], but_for=own)
    hooks = [parameter.register_hook(_shown_to(see)) for parameter in task.parameters]
    try:
        _go(plan, task, logical)
    finally:
        for hook in hooks:
            hook.remove()
        noted.put_back()


def _go(plan: Plan, task: Task, batch: Batch) -> None:
    """Forward and backward of every micro-batch, as a step makes them; then all is put back."""
    loss = task.loss if plan.is_cut else task.loss.uncut()
    task.streams.begin(task.modules)
    run = Run(plan, task, batch, loss)
    run.is_guarded = False  # nothing is refused: what overflows is to be seen
    try:
        with plan.precision.arithmetic(), conditions(plan, task, plan.blocks), ExitStack() as stack:
            with plan.precision.computing(task.kinds):  # in a first pass, too
                along = loss.along(batch, plan.sizes, task.model, run.before.put_buffers_back)
                share = stack.enter_context(along)
            start = 0
            for rows, micro in zip(plan.sizes, batch.parts(plan.sizes), strict=True):
                run.begin(draws=batch.draws)
                run.add(micro, share(start, start + rows), rows)
                start += rows
    finally:
        run.undo()


def _shown_to(see: See) -> Callable[[Tensor], None]:
    def show(gradient: Tensor) -> None:  # returns nothing, so that the gradient stays what it is
        see(gradient.detach())

    return show


def _copied(batch: Batch) -> Batch:
    """The same rows in memory of their own."""
    if isinstance(batch, SampleBatch):
        collate = batch.collate
        return SampleBatch(batch.given, lambda samples: tree.map_leaves(_copy, collate(samples)))
    return TensorBatch(tree.map_leaves(_copy, batch.whole))


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
