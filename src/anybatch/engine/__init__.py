"""The step itself: plan, task, gradients, execution and update."""

from anybatch.engine.accumulate import Accumulator, Redone, tally
from anybatch.engine.execute import (
    NotUndoneError,
    Restart,
    accumulate,
    carry_out,
    clear,
    finish,
    no_room_for_update,
    observe,
    put_back,
    report_of,
    snapshot,
    too_large,
    update,
)
from anybatch.engine.gradients import Apart, Gradients, Sums, accumulation_dtype
from anybatch.engine.observer import Observer, Reader
from anybatch.engine.plan import Plan, check_micro_batch
from anybatch.engine.schedule import Schedule
from anybatch.engine.strategy import Agreed, Single, Strategy
from anybatch.engine.task import Progress, Signature, Task, admit, check_parts, context, gather, refuse_hooks
from anybatch.engine.undivided import undivided
from anybatch.engine.update import (
    TornUpdateError,
    clip,
    learning_rate_of,
    norm_of,
    owned,
    step_optimizers,
)

__all__ = [
    "Accumulator",
    "Agreed",
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
    "Sums",
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
    "learning_rate_of",
    "no_room_for_update",
    "norm_of",
    "observe",
    "owned",
    "put_back",
    "refuse_hooks",
    "report_of",
    "snapshot",
    "step_optimizers",
    "tally",
    "too_large",
    "undivided",
    "update",
]
