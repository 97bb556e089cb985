"""The way of a batch through the model. Faults are in tests/faults/test_memory.py and test_overflow.py."""

import torch
from torch import nn

from anybatch import Plan
from anybatch.core.batch import TensorBatch
from anybatch.engine.course import Course
from anybatch.engine.run import Run
from tests.engine.test_execute import make_task

X = torch.arange(1.0, 7.0)


def test_rows_are_added_in_order_in_these_sizes() -> None:
    task = make_task(nn.L1Loss(reduction="sum"))
    plan, batch = Plan(rows=6, micro_batch=3, cut=(3, 1, 2)), TensorBatch((X, torch.zeros(6)))
    run, places = Run(plan, task, batch, task.loss), []
    course = Course(
        run=run,
        plan=plan,
        task=task,
        batch=batch,
        share=lambda start, stop: places.append((start, stop)) or task.loss,  # type: ignore[func-returns-value]
        sizes=plan.sizes,
    )
    course.go()
    assert places == [(0, 3), (3, 4), (4, 6)]
    assert run.rows == [3, 1, 2]
    assert run.redone == []
    gradient = task.parameters[0].grad
    assert gradient is not None
    assert gradient.item() == X.sum().item()
