"""Dry run: show the gradients of a batch to a callback, without an update; everything is put back."""

from dataclasses import replace
from typing import Any

from anybatch.compare import reached_by
from anybatch.core import Callbacks
from anybatch.engine import admit, carry_out
from anybatch.precision import LossScale, Precision
from anybatch.state import Effects


def show(
    step: Any,
    batch: Any,
    callback: object,
    *,
    precision: Precision | None = None,
    scale: float | None = None,
    micro_batch: int | None = None,
) -> None:
    """Show the gradients of a whole batch to a callback; values that are not finite are shown, too.

    Model, buffers, gradients, optimizers, random streams and what else a forward reaches are as before, and a
    window that is open goes on.

    Args:
        step: an `anybatch.Step`.
        batch: as for the step; its tensors are copied, because a model may write to them.
        callback: its methods `micro_gradients` and `gradients` are called.
        precision: the dtypes to compute in, in micro-batches of a fixed size; the weights stay stored as they
            are. None to do as the step would, which then learns what fits.
        scale: the loss scale, a power of two. None for that of the step.
        micro_batch: with a precision, rows per micro-batch. None for the step's own, or all rows.

    Raises:
        BatchError: the batch cannot be cut, or is not where the model is.
        PlanError: rows meet in the model, so the batch must not be cut, or the scale is no power of two.
    """
    task = step.task().alone()
    fixed = task.scale if scale is None else LossScale(Precision(loss_scale=scale))
    changes: dict[str, Any] = {"effects": Effects(), "schedulers": (), "callbacks": Callbacks.of([callback])}
    task = running = replace(task, scale=fixed, **changes)
    task.effects.begin(task.network.modules)
    logical = admit(batch, task, step.collate).copied()
    noted = reached_by(task, logical)
    try:
        if precision is None:
            plan, running = step.planning.of(task, logical)
        else:
            size = min(logical.rows, micro_batch or step.micro_batch or logical.rows)
            plan = replace(step.planning.settings, rows=logical.rows, micro_batch=size, precision=precision)
        if plan.is_cut:
            step.planning.guard.refuse_meetings(task)
        if plan.is_cut and precision is None:
            step.planning.guard.look(task, logical, plan, plan.micro_batch)
        with step.planning.enforced(task):
            carry_out(plan, running, logical, is_dry=True)
    finally:
        noted.put_back()
