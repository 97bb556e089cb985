"""The measuring instruments measure: reference, tolerance and errors, against numbers by hand."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.testing import reference_step, relative_error

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
Y = torch.tensor([[1.0], [0.0], [2.0]])


def line() -> nn.Linear:
    """y = 2 a - b + 1."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.bias.fill_(1.0)
    return model


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
