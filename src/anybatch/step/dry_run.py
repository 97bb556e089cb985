"""Dry run: show the gradients of a batch to a callback, without an update; everything is put back."""

from dataclasses import replace
from typing import Any

from anybatch.core import Callbacks
from anybatch.engine import admit, carry_out
from anybatch.state import Effects
from anybatch.step.meetings import refuse_meetings
from anybatch.trial import bench


def show(step: Any, batch: Any, callback: object) -> None:
    """Show the gradient of a whole batch to a callback; values that are not finite are shown, too.

    Model, buffers, gradients, optimizers, random streams and what else a forward reaches are as before, and a
    window that is open goes on.
    """
    changes = {"effects": Effects(), "schedulers": (), "callbacks": Callbacks.of([callback])}
    task = replace(step.task().alone(), **changes)
    task.effects.begin(task.network.modules, looks=True)
    logical = admit(batch, task, step.collate).copied()
    with bench(task, logical):
        plan, running = step.planning.plan_for(task, logical)
        if plan.is_cut or logical.order:
            refuse_meetings(task, plan)
            step.planning.audit.few(task, logical, plan, plan.micro_batch)
        with step.planning.enforced(task, logical):
            carry_out(plan, running, logical, is_dry=True)
