"""The step itself: plan, task, gradients, execution and update."""

from anybatch.engine import update
from anybatch.engine.before import Before
from anybatch.engine.conditions import conditions
from anybatch.engine.course import Course
from anybatch.engine.execute import execute
from anybatch.engine.gradients import Gradients, accumulation_dtype
from anybatch.engine.plan import Plan, check_micro_batch
from anybatch.engine.run import Redone, Run, too_large, without_update
from anybatch.engine.scaled import Skipped
from anybatch.engine.task import Task
from anybatch.engine.update import check_optimizers, check_schedulers, owned

__all__ = [
    "Before",
    "Course",
    "Gradients",
    "Plan",
    "Redone",
    "Run",
    "Skipped",
    "Task",
    "accumulation_dtype",
    "check_micro_batch",
    "check_optimizers",
    "check_schedulers",
    "conditions",
    "execute",
    "owned",
    "too_large",
    "update",
    "without_update",
]
