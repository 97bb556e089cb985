"""One micro-batch at its loss scale. The laws are in tests/faults/test_overflow.py and test_not_finite.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Plan, Precision, Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import NonFiniteLossError
from anybatch.core.finite import NonFinite
from anybatch.core.report import MicroBatchRedone
from anybatch.engine.run import Run
from anybatch.engine.scaled import Adder, Skipped
from anybatch.engine.smaller import Smaller
from anybatch.precision.loss_scale import LossScale
from anybatch.precision.policy import find_precision
from anybatch.testing import relative_error, tolerance
from tests.engine.test_execute import make_task

X = torch.arange(1.0, 7.0)[:, None]


class Failing:
    """Its first additions are not finite."""

    def __init__(self, times: int, where: str = "gradient", **options: Any) -> None:
        self.told: list[Any] = []
        self.task = make_task(nn.MSELoss(), nn.Linear(1, 1))
        precision = Precision(compute="bfloat16", loss_scale="dynamic")
        object.__setattr__(self.task, "scale", LossScale(precision))
        object.__setattr__(self.task, "listeners", (self.told.append,))
        self.task.scale.value = 4.0
        plan = Plan(rows=6, micro_batch=3, precision=precision, **options)
        self.run = Run(plan, self.task, TensorBatch((X, X)), self.task.loss)
        self.adder, self.left, self.where = Adder(self.run, plan, self.task), times, where
        self.run.add = self.fail  # type: ignore[method-assign]

    def fail(self, micro: Any, loss: Any, rows: int, *, again: bool) -> None:
        self.left -= 1
        if self.left >= 0:
            raise NonFinite(self.where)
        self.run.rows.append(rows)

    def add(self) -> str:
        said = self.adder.begin(draws=False, in_window=False)
        assert said == ""
        return self.adder.add(lambda: ((X, X), self.task.loss), place=0, left=[3, 3], again=False)


def test_it_comes_again_at_half_the_scale() -> None:
    case = Failing(2)
    assert case.add() == ""
    assert (case.task.scale.value, len(case.run.redone), case.run.rows) == (1.0, 2, [3])
    assert [type(one) for one in case.told] == [MicroBatchRedone] * 2
    assert case.told[0].reason == "the gradient overflowed at a loss scale of 4"


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_what_no_scale_mends_is_refused_and_the_scale_is_as_before(where: str) -> None:
    case = Failing(9, where)
    with pytest.raises(NonFiniteLossError, match=f"finite {where}.*rows 0 to 2.*a mean over no valid target"):
        case.add()
    assert case.task.scale.value == 4.0


def test_or_left_out_or_the_update_is_skipped() -> None:
    case = Failing(9, non_finite="drop")
    assert case.add() == ""
    assert (case.run.dropped, case.run.rows, case.task.scale.value) == (3, [3], 4.0)
    with pytest.raises(Skipped):
        Failing(9, non_finite="skip").add()


def test_one_that_drew_for_the_first_time_lets_the_step_begin_again_with_the_whole_cut() -> None:
    case = Failing(0)
    case.task.streams.is_looking = False
    assert case.add() == ""

    def draw(*_: Any, **__: Any) -> None:
        torch.rand(1)
        raise NonFinite("gradient")

    case.run.add = draw  # type: ignore[method-assign]
    case.adder.begin(draws=False, in_window=False)
    with pytest.raises(Smaller) as found:
        case.adder.add(lambda: ((X, X), case.task.loss), place=3, left=[2, 1], again=False)
    assert found.value.sizes == (3, 2, 1)


def test_memory_that_runs_out_is_said_and_other_errors_go_on() -> None:
    case = Failing(0)
    case.run.add = _raising(MemoryError("no room"))  # type: ignore[method-assign]
    assert case.add() == "MemoryError: no room"
    case.run.add = _raising(KeyError("other"))  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        case.add()


def _raising(error: Exception) -> Any:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_what_a_forward_writes_into_its_rows_is_gone_when_they_come_again(precision: str) -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, rows: dict[str, Tensor]) -> Tensor:
            rows["x"] = rows["x"] * 0.5 + 1
            return self.layer(rows["x"])

    def squares(model: nn.Module, rows: dict[str, Tensor]) -> Total:
        return Total(model(rows).float().square().sum(), len(rows["y"]))

    weights: list[Tensor] = []
    for asked in (precision, replace(find_precision(precision), loss_scale=1.0)):
        torch.manual_seed(0)
        model = Writer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = Step(model, squares, optimizer, micro_batch=4, precision=asked)
        report = step({"x": torch.full((8, 3), 9.0), "y": torch.zeros(8)})
        weights.append(model.layer.weight.detach().float())
        assert (report.redone == 0) is (asked is not precision)
    assert relative_error(*weights) <= tolerance(torch.float16, 8)
