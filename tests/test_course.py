"""The way of a batch: halves, reasons, what holds meanwhile. Faults are in tests/faults/test_memory.py."""

import pytest
import torch
from torch import nn

from anybatch import Plan
from anybatch.batch import TensorBatch
from anybatch.course import Course, conditions, halves, out_of_memory, why_not_cut
from anybatch.errors import LossError
from anybatch.meetings import batch_norms
from anybatch.run import Run
from anybatch.task import Task
from tests.test_execute import make_task

X = torch.arange(1.0, 7.0)


@pytest.mark.parametrize(
    ("rows", "too_large", "sizes"), [(8, 8, [4, 4]), (7, 3, [2, 2, 2, 1]), (2, 2, [1, 1]), (1, 5, [1])]
)
def test_halves(rows: int, too_large: int, sizes: list[int]) -> None:
    assert halves(rows, too_large) == sizes


def with_norm() -> Task:
    model = nn.Sequential(nn.BatchNorm1d(2))
    task = make_task(nn.MSELoss(), model)
    object.__setattr__(task, "batch_norms", batch_norms(model.modules()))
    return task


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


def test_why_a_batch_is_not_cut() -> None:
    plan, batch = Plan(rows=6, micro_batch=6), TensorBatch((X, X))

    def refuse(task: Task, batch: object, rows: int) -> None:
        raise LossError(f"not in parts of {rows}")

    task = make_task(nn.MSELoss())
    assert why_not_cut(plan, task, batch, 6, is_uncut=True) == ""
    assert "one row" in why_not_cut(plan, task, batch, 1, is_uncut=True)
    assert "BatchNorm (0)" in why_not_cut(plan, with_norm(), batch, 6, is_uncut=False)
    object.__setattr__(task, "before_cut", refuse)
    assert "not in parts of 3" in why_not_cut(plan, task, batch, 6, is_uncut=True)
    assert why_not_cut(plan, task, batch, 6, is_uncut=False) == ""


def test_conditions_hold_and_end() -> None:
    task = with_norm()
    with conditions(Plan(rows=6, micro_batch=3, batch_norm="frozen"), task, ()):
        assert not task.batch_norms[0].training
    assert task.batch_norms[0].training


def test_the_error_says_what_and_why() -> None:
    assert "4 rows" in str(out_of_memory("MemoryError: no room", 4, "because"))
    assert "(MemoryError: no room)" in str(out_of_memory("MemoryError: no room", 4, "because"))
    assert ", and because." in str(out_of_memory("MemoryError: no room", 4, "because"))
