"""The measuring instruments measure: reference, tolerance, recorder, toy models, against numbers by hand."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Terms, Total
from anybatch.testing import (
    ConvNet,
    GradientRecorder,
    Perceptron,
    Transformer,
    reference_step,
    relative_error,
    tolerance,
)

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
Y = torch.tensor([[1.0], [0.0], [2.0]])


def line() -> nn.Linear:
    """y = 2 a - b + 1."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.bias.fill_(1.0)
    return model


# ---- tolerance


def test_shorter_dtypes_and_longer_sums_are_given_more() -> None:
    limits = [tolerance(dtype, 10) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert limits == sorted(limits)
    assert tolerance(torch.float64, 4000) < 1e-12
    assert tolerance(torch.float32, 100) > tolerance(torch.float32, 10)
    with pytest.raises(KeyError):
        tolerance(torch.int64, 1)


# ---- relative_error


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (1e-300, 0.0, math.inf),
        (0.0, 2.0, 1.0),
        ({"a": torch.tensor([3.0]), "b": [4.0, 5.0]}, {"a": torch.tensor([3.0]), "b": [4.0, 0.0]}, 1.0),
        (torch.tensor([1], dtype=torch.bfloat16), torch.tensor([1.0]).double(), 0.0),
    ],
    ids=str,
)
def test_relative_error(actual: Any, expected: Any, error: float) -> None:
    assert relative_error(actual, expected) == error


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (math.nan, 1.0),
        (math.inf, math.inf),
        ({"a": torch.tensor([0.0, math.nan])}, {"a": torch.tensor([0.0, math.nan])}),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
        (torch.ones(2), torch.ones(1)),
        (torch.ones(2, 1), torch.ones(2)),
        ([1.0], 1.0),
    ],
    ids=str,
)
def test_what_is_not_finite_and_other_nests_are_infinitely_wrong(actual: Any, expected: Any) -> None:
    assert relative_error(actual, expected) == relative_error(expected, actual) == math.inf


# ---- reference_step


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
    before = copy.deepcopy((model.state_dict(), loss.state_dict())), torch.get_rng_state()
    first, again = (reference_step(model, loss, batch) for _ in range(2))
    assert relative_error(first.gradients, again.gradients) == 0
    assert relative_error((model.state_dict(), loss.state_dict()), before[0]) == 0
    assert torch.equal(torch.get_rng_state(), before[1])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model[2].weight.grad.tolist() == [[1, 1]]
    assert model[2].bias.grad is None
    assert batch[0].grad is None


def test_parameters_of_the_loss_stand_under_its_name() -> None:
    if hasattr(nn, "LinearCrossEntropyLoss"):
        loss = nn.LinearCrossEntropyLoss(1, 4)
        whole = reference_step(line(), loss, (X, torch.tensor([0, 1, 2])))
        assert set(whole.gradients) == {"weight", "bias", "loss.linear.weight"}


# ---- GradientRecorder


def test_the_recorder_keeps_copies_and_changes_nothing() -> None:
    model = line()
    model.bias.requires_grad_(False)
    recorder = GradientRecorder(model)
    before = copy.deepcopy(model.state_dict())
    assert recorder.gradients == {}
    Step(model, nn.MSELoss(), recorder, micro_batch=2)((X, Y))
    assert recorder.gradients.keys() == {"weight"}
    assert relative_error(recorder.gradients["weight"], torch.tensor([[16.0, 20.0]])) <= tolerance(
        torch.float32, 2
    )
    assert relative_error(model.state_dict(), before) == 0
    assert model.weight.grad is None


# ---- toy models


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Perceptron(3, 2), torch.randn(4, 5, 3)),
        (ConvNet(2, 3), torch.randn(4, 2, 5, 6)),
        (Transformer(7), torch.randint(7, (4, 5))),
    ],
    ids=["perceptron", "conv net", "transformer"],
)
def test_rows_do_not_meet_in_toy_models(model: nn.Module, inputs: Tensor) -> None:
    model = model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    together = model(inputs)
    alone = torch.cat([model(row) for row in inputs.split(1)])
    assert relative_error(together, alone) <= tolerance(torch.float64, 1)
    assert len(list(model.parameters())) > 0


def test_padding_is_seen_by_no_token() -> None:
    model = Transformer(7).double()
    short, padded = torch.tensor([[3, 1, 2]]), torch.tensor([[3, 1, 2, 0, 0]])
    assert relative_error(model(padded)[:, :, :3], model(short)) <= tolerance(torch.float64, 1)
    assert model(torch.zeros(2, 4, dtype=torch.long)).isfinite().all()
