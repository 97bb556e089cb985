"""The step itself: plan, task, gradients, the loop and the update. Read window.py first."""

from anybatch.engine.gradients import Apart, Gradient, Gradients, accumulation_dtype, multiply
from anybatch.engine.observer import Observer, Reader
from anybatch.engine.part import Part
from anybatch.engine.plan import Plan, check_micro_batch
from anybatch.engine.strategy import Agreed, Single, Strategy
from anybatch.engine.sums import Sums
from anybatch.engine.task import Progress, Signature, Task, admit, check_parts, context, gather, refuse_hooks
from anybatch.engine.update import (
    TornUpdateError,
    clip,
    learning_rate_of,
    norm_of,
    owned,
    step_optimizers,
)
from anybatch.engine.window import Source, Window, carry_out, snapshot

__all__ = [
    "Agreed",
    "Apart",
    "Gradient",
    "Gradients",
    "Observer",
    "Part",
    "Plan",
    "Progress",
    "Reader",
    "Signature",
    "Single",
    "Source",
    "Strategy",
    "Sums",
    "Task",
    "TornUpdateError",
    "Window",
    "accumulation_dtype",
    "admit",
    "carry_out",
    "check_micro_batch",
    "check_parts",
    "clip",
    "context",
    "gather",
    "learning_rate_of",
    "multiply",
    "norm_of",
    "owned",
    "refuse_hooks",
    "snapshot",
    "step_optimizers",
]
