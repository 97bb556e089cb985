"""What is too large: parts, reasons, and what lets a step begin again."""

import pytest
import torch
from torch import nn

from anybatch import Plan
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import LossError, NonFiniteLossError, OutOfMemoryError
from anybatch.engine.run import Run
from anybatch.engine.smaller import Smaller, begin_again, halves, out_of_memory, put_back, why_not_cut
from anybatch.engine.task import Task
from tests.engine.test_conditions import with_norm
from tests.engine.test_execute import make_task

X = torch.arange(1.0, 7.0)


@pytest.mark.parametrize(
    ("rows", "too_large", "sizes"), [(8, 8, [4, 4]), (7, 3, [2, 2, 2, 1]), (2, 2, [1, 1]), (1, 5, [1])]
)
def test_halves(rows: int, too_large: int, sizes: list[int]) -> None:
    assert halves(rows, too_large) == sizes


def test_why_a_batch_is_not_cut() -> None:
    plan, batch = Plan(rows=6, micro_batch=6), TensorBatch((X, X))

    def refuse(task: Task, batch: object, rows: int) -> None:
        raise LossError(f"not in parts of {rows}")

    task = make_task(nn.MSELoss())
    assert why_not_cut(plan, task, batch, 6, is_uncut=True) == ""
    assert "one row" in why_not_cut(plan, task, batch, 1, is_uncut=True)
    for chosen in (None, "micro"):
        plan = Plan(rows=6, micro_batch=6, batch_norm=chosen)
        assert "BatchNorm (0)" in why_not_cut(plan, with_norm(), batch, 6, is_uncut=False)
    plan = Plan(rows=6, micro_batch=6, batch_norm="frozen")
    assert why_not_cut(plan, with_norm(), batch, 6, is_uncut=False) == ""
    object.__setattr__(task, "before_cut", refuse)
    assert "not in parts of 3" in why_not_cut(plan, task, batch, 6, is_uncut=True)
    assert why_not_cut(plan, task, batch, 6, is_uncut=False) == ""


def test_the_error_says_what_and_why() -> None:
    assert "4 rows" in str(out_of_memory("MemoryError: no room", 4, "because"))
    assert "(MemoryError: no room)" in str(out_of_memory("MemoryError: no room", 4, "because"))
    assert ", and because." in str(out_of_memory("MemoryError: no room", 4, "because"))


def begun() -> tuple[Run, Task]:
    task = make_task(nn.MSELoss(), nn.Linear(1, 1))
    task.streams.begin(task.modules)
    plan, batch = Plan(rows=6, micro_batch=3), TensorBatch((X[:, None], X[:, None]))
    run = Run(plan, task, batch, task.loss)
    run.begin()
    return run, task


def test_a_step_begins_again_where_all_is_as_it_was() -> None:
    run, task = begun()
    again = begin_again(run, task, [2, 4])
    assert isinstance(again, Smaller)
    assert again.sizes == (2, 4)
    task.streams.write([task.parameters[0]])  # from now on; nobody noted it when the step began
    assert isinstance(begin_again(run, task, [2, 4]), OutOfMemoryError)


def test_a_parameter_that_was_written_to_is_said() -> None:
    run, task = begun()
    with torch.no_grad():
        task.parameters[0].add_(1)
    with pytest.raises(NonFiniteLossError, match=r"got 1 that .* \(it overflowed\)"):
        put_back(run, task, "it overflowed", NonFiniteLossError)
    assert task.streams.written[0] is task.parameters[0]


def test_a_stream_that_was_not_noted_and_moved_is_noted_from_now_on() -> None:
    run, task = begun()
    assert put_back(run, task, "", OutOfMemoryError)
    task.streams.is_looking = False
    run.begin()
    assert put_back(run, task, "", OutOfMemoryError)
    torch.rand(1)
    assert not put_back(run, task, "", OutOfMemoryError)
    assert task.streams.is_torchs_moved
