"""From a loss back to its means."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from anybatch.core.errors import LossError
from anybatch.losses.model.graph import adds_nothing, call_model, factors_of, loss_of, numbered

MODEL = nn.Linear(2, 2)


class Mean(NamedTuple):
    """A stop."""

    value: Tensor
    node: Any


def means(number: int) -> list[Mean]:
    values = [MODEL(torch.ones(3, 2)).mean() for _ in range(number)]
    return [Mean(value, value.grad_fn) for value in values]


def test_factors_of_each_mean() -> None:
    a, b, c = means(3)
    loss = (a.value + b.value) / 2 - 3 * b.value
    assert factors_of(MODEL, loss, [a, c, b]) == ({0: 0.5, 2: -2.5}, True)


def test_the_mean_itself_and_its_copy() -> None:
    (a,) = means(1)
    assert factors_of(MODEL, a.value, [a]) == factors_of(MODEL, a.value.clone(), [a]) == ({0: 1.0}, False)
    assert factors_of(MODEL, -a.value, [a]) == ({0: -1.0}, False)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda a: a.value + MODEL.weight.norm(), "reaches parameter 'weight'"),
        (lambda a: a.value + torch.ones(2, requires_grad=True).sum(), r"a tensor of shape \(2,\)"),
        (lambda a: a.value.square(), "constant factors"),
    ],
)
def test_refused(loss: Any, message: str) -> None:
    (a,) = means(1)
    with pytest.raises(LossError, match=message) as caught:
        factors_of(MODEL, loss(a), [a])
    assert "Linear" in str(caught.value)
    assert "ab.Total" in str(caught.value)


class Output:
    """What some models return."""

    loss = torch.ones((), requires_grad=True) * 2


@pytest.mark.parametrize(
    "output",
    [Output(), {"loss": Output.loss}, Output.loss, (torch.ones(2), Output.loss, None), [Output.loss]],
)
def test_the_loss_is_found(output: Any) -> None:
    assert loss_of(MODEL, output) is Output.loss


@pytest.mark.parametrize(
    ("output", "came"),
    [
        (None, "None"),
        ({"logits": 1}, "None in a dict"),
        (torch.ones(2, requires_grad=True), r"shape \(2,\)"),
        (torch.ones(()), "without gradient"),
        ((Output.loss, Output.loss), "2 scalars"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "torch.complex64"),
    ],
)
def test_no_loss(output: Any, came: str) -> None:
    with pytest.raises(LossError, match=f"Expected Linear to return its loss .*{came}"):
        loss_of(MODEL, output)


def test_a_tensor_is_the_only_argument() -> None:
    assert torch.equal(call_model(nn.Identity(), torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("output", "nothing"),
    [
        ({"loss": torch.tensor(0.0)}, True),
        ({"loss": torch.tensor(1.0)}, False),
        ({"loss": torch.tensor(0)}, False),
        ({"loss": torch.zeros(2)}, False),
        (torch.zeros((), requires_grad=True), False),
        (None, False),
    ],
)
def test_a_constant_zero_adds_nothing(output: Any, nothing: bool) -> None:
    assert adds_nothing(output) == nothing


def test_names_are_numbered_where_they_come_again() -> None:
    assert numbered(["router"]) == ["loss"]
    assert numbered(["a", "b", "a"]) == ["a", "b", "a 2"]
