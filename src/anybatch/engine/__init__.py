"""The step itself: plan, task, gradients, execution and update."""

from anybatch.engine.accumulate import Accumulator, Redone
from anybatch.engine.execute import (
    NotUndoneError,
    Restart,
    accumulate,
    carry_out,
    clear,
    context,
    finish,
    no_room_for_update,
    observe,
    put_back,
    report_of,
    snapshot,
    too_large,
    update,
)
from anybatch.engine.gradients import Apart, Gradients, accumulation_dtype
from anybatch.engine.observer import Observer, Reader
from anybatch.engine.plan import Plan, check_micro_batch
from anybatch.engine.schedule import Schedule
from anybatch.engine.strategy import Single, Strategy
from anybatch.engine.task import Progress, Signature, Task, admit, check_parts, gather
from anybatch.engine.update import (
    TornUpdateError,
    clip,
    norm_of,
    owned,
    step_optimizers,
)

__all__ = [
    "Accumulator",
    "Apart",
    "Gradients",
    "NotUndoneError",
    "Observer",
    "Plan",
    "Progress",
    "Reader",
    "Redone",
    "Restart",
    "Schedule",
    "Signature",
    "Single",
    "Strategy",
    "Task",
    "TornUpdateError",
    "accumulate",
    "accumulation_dtype",
    "admit",
    "carry_out",
    "check_micro_batch",
    "check_parts",
    "clear",
    "clip",
    "context",
    "finish",
    "gather",
    "no_room_for_update",
    "norm_of",
    "observe",
    "owned",
    "put_back",
    "report_of",
    "snapshot",
    "step_optimizers",
    "too_large",
    "update",
]
