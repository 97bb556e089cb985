"""What holds while micro-batches go through the model, and no longer."""

from contextlib import nullcontext

from torch import nn

from anybatch import Plan
from anybatch.batchnorm.modes import find_batch_norms
from anybatch.engine.conditions import conditions
from anybatch.engine.task import Task
from tests.engine.test_execute import make_task


def with_norm() -> Task:
    model = nn.Sequential(nn.BatchNorm1d(2))
    task = make_task(nn.MSELoss(), model)
    object.__setattr__(task, "batch_norms", find_batch_norms(model.modules()))
    return task


def test_conditions_hold_and_end() -> None:
    task = with_norm()
    with conditions(Plan(rows=6, micro_batch=3, batch_norm="frozen"), task, ()):
        assert not task.batch_norms[0].training
    assert task.batch_norms[0].training


def test_blocks_have_their_policy_for_a_while() -> None:
    task = make_task(nn.MSELoss(), nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)))
    with conditions(Plan(rows=6, micro_batch=3), task, (("0", "recompute"),)):
        assert "forward" in vars(task.model[0])
    assert "forward" not in vars(task.model[0])


def test_where_nothing_is_to_hold_nothing_is_done() -> None:
    found = conditions(Plan(rows=6, micro_batch=3), with_norm(), ())
    assert isinstance(found, nullcontext)
