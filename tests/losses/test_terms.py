"""Losses of a user's own: totals by name, coefficients, promised weights."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step, Terms, Total
from anybatch.check.check import check
from anybatch.core.errors import LossError
from anybatch.testing import GradientRecorder, relative_error, tolerance
from tests.check.conftest import unhurried as unhurried
from tests.options import flat

ROWS = 5
X = torch.randn(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def rows_and_size(model: nn.Module, micro: Tensor) -> dict[str, Total]:
    return {"mean": Total(model(micro).sum(), len(micro)), "size": Total(model.weight.square().sum(), 1.0)}


def take(loss: Any, batch: Any = X, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    model = nn.Linear(2, 1).double()
    recorder = GradientRecorder(model)
    step = Step(model, loss, recorder, **flat({"micro_batch": 2} | options))
    return step(batch), recorder.gradients


@pytest.mark.parametrize(
    ("made", "got"),
    [
        ({"coefficients": {"size": math.nan}}, "coefficient for 'size', got nan"),
        ({"function": 3}, "got int"),
        ({"weight": {"mean": ROWS}}, "got ['mean']. Name the same terms in both"),
        ({"weight": {"mean": "5", "size": 3}}, "got str"),
    ],
    ids=range(4),
)
def test_terms_and_promises_that_do_not_fit_are_refused(made: dict[str, Any], got: str) -> None:
    weight = made.get("weight")
    made = {"function": rows_and_size} | made | {"weight": None if weight is None else lambda batch: weight}
    with pytest.raises(LossError, match=re.escape(got)):
        take(Terms(**made))


def test_nothing_in_the_first_micro_batch_is_no_loss_of_digits() -> None:
    def late(model: nn.Module, micro: Tensor) -> Total:
        return Total.zero() if torch.equal(micro, X[:2]) else Total(model(micro).sum(), len(micro))

    _, gradients = take(Terms(late, weight=lambda batch: 3), check=False)
    expected = {"weight": X[2:].mean(0, keepdim=True), "bias": torch.ones(1)}
    assert relative_error(gradients, expected) <= tolerance(torch.float64, ROWS)


@pytest.mark.parametrize("how", ["step", "check", "ModelLoss"])
def test_a_function_of_outputs_and_targets_is_told_how_it_is_called(how: str) -> None:
    loss = lambda a, b: (a - b).mean()  # noqa: E731
    given = ab.ModelLoss(call=loss) if how == "ModelLoss" else loss
    with pytest.raises(TypeError) as caught:
        check(nn.Linear(2, 1), loss, X.float()) if how == "check" else take(given)
    assert "as loss(model, micro), not as loss(outputs, targets)" in caught.value.__notes__[0]
