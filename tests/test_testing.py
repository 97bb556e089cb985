"""The measuring instruments measure: reference, tolerance and errors, against numbers by hand."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Terms, Total
from anybatch.testing import reference_step, relative_error, tolerance
from tests.snapshots import changes

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
Y = torch.tensor([[1.0], [0.0], [2.0]])


def line() -> nn.Linear:
    """y = 2 a - b + 1."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.bias.fill_(1.0)
    return model


def test_shorter_dtypes_and_longer_sums_are_given_more() -> None:
    limits = [tolerance(dtype, 10) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert limits == sorted(limits)
    assert tolerance(torch.float64, 4000) < 1e-12
    assert tolerance(torch.float32, 100) > tolerance(torch.float32, 10)
    with pytest.raises(KeyError):
        tolerance(torch.int64, 1)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (1e-300, 0.0, math.inf),
        (0.0, 2.0, 1.0),
        ({"a": torch.tensor([3.0]), "b": [4.0, 5.0]}, {"a": torch.tensor([3.0]), "b": [4.0, 0.0]}, 1.0),
        (torch.tensor([1], dtype=torch.bfloat16), torch.tensor([1.0]).double(), 0.0),
        # What is not finite, and other nests, are infinitely wrong.
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, math.inf, math.inf),
        ({"a": torch.tensor([0.0, math.nan])}, {"a": torch.tensor([0.0, math.nan])}, math.inf),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, math.inf),
        ({"a": 1.0, "b": 1.0}, {"a": 1.0}, math.inf),
        (torch.ones(2), torch.ones(1), math.inf),
        (torch.ones(2, 1), torch.ones(2), math.inf),
        ([1.0], 1.0, math.inf),
    ],
    ids=str,
)
def test_relative_error(actual: Any, expected: Any, error: float) -> None:
    assert relative_error(actual, expected) == error


def test_the_reference_by_hand() -> None:
    """Outputs 1, 3, 5; errors 0, 3, 3; squared 0, 9, 9."""
    whole = reference_step(line(), nn.MSELoss(), (X, Y))
    assert whole.loss == 6.0
    assert whole.gradients["weight"].tolist() == [[2 / 3 * (9 + 15), 2 / 3 * (12 + 18)]]
    assert whole.gradients["bias"].tolist() == [2 / 3 * 6]
    assert {gradient.dtype for gradient in whole.gradients.values()} == {torch.float64}


def squared(model: nn.Module, micro: Any) -> Total:
    return Total((model(micro[0]) - micro[1]).square().sum(), len(micro[1]))


def with_size(model: nn.Module, micro: Any) -> dict[str, Total]:
    size = model.weight.square().sum()  # 5
    return {
        "fit": squared(model, micro),
        "size": Total(size * 3, 3),
        "tenth": Total(0.3, 3),
        "none": Total.zero(),
    }


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.MSELoss(reduction="sum"), 18.0),
        (partial(F.mse_loss, weight=torch.tensor([[1.0], [2.0], [1.0]])), 27 / 4),
        (squared, 6.0),
        (Terms(with_size, coefficients={"size": 0.5}), 6.0 + 2.5 + 0.1),
        (Terms(with_size, coefficients={"fit": 0, "tenth": -1}), 5.0 - 0.1),
    ],
    ids=["sum", "weight", "total", "terms", "coefficients"],
)
def test_the_reference_takes_every_kind_of_loss(loss: Any, expected: float) -> None:
    whole = reference_step(line(), loss, (X, Y))
    assert relative_error(whole.loss, expected) <= tolerance(torch.float64, 3)


def test_the_reference_leaves_everything_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), line()).bfloat16()
    loss = nn.BCEWithLogitsLoss(weight=torch.ones(1, dtype=torch.bfloat16))
    model[2].weight.grad = torch.ones(1, 2, dtype=torch.bfloat16)
    batch = X.bfloat16().requires_grad_(), Y.bfloat16()

    def state() -> dict[str, Any]:
        grads = [parameter.grad for parameter in (*model.parameters(), batch[0])]
        return {"state": [*model.state_dict().values(), loss.weight, *grads], "rng": torch.get_rng_state()}

    before = copy.deepcopy(state())
    first, again = (reference_step(model, loss, batch) for _ in range(2))
    assert relative_error(first.gradients, again.gradients) == 0
    assert changes(before, state()) == []


def test_parameters_of_the_loss_stand_under_its_name() -> None:
    if hasattr(nn, "LinearCrossEntropyLoss"):
        loss = nn.LinearCrossEntropyLoss(1, 4)
        whole = reference_step(line(), loss, (X, torch.tensor([0, 1, 2])))
        assert set(whole.gradients) == {"weight", "bias", "loss.linear.weight"}
