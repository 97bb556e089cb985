"""Copies: other objects, shared parameters, functions with what they hold; and modules put back."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.check.copies import Copied, named_parameters, untouched
from anybatch.core.total import Total
from anybatch.losses.terms import Terms

SCALE = torch.ones(3)


class Counting(nn.Module):
    """Counts its calls, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))
        self.calls: list[int] = []
        self.plain = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3) to the same."""
        self.seen += 1
        self.calls.append(len(x))
        return x * self.weight * self.plain


def test_passes_share_parameters_and_nothing_else() -> None:
    model = Counting()
    copied = Copied(model, nn.MSELoss(), torch.float64)
    one, _ = copied.fresh()
    one(torch.ones(2, 3))
    two, _ = copied.fresh()
    assert two.weight is one.weight is copied.named["weight"]
    assert two.weight is not model.weight
    assert two.weight.dtype == two.plain.dtype == two.seen.dtype == torch.float64
    assert (float(one.seen), float(two.seen), one.calls, two.calls) == (1, 0, [2], [])
    assert model.weight.dtype == torch.float32
    assert model.calls == []


def test_functions_are_copied_with_what_they_hold() -> None:
    model, log, weight = Counting(), list[int](), torch.ones(3)

    def loss(given: nn.Module, micro: Any, *, kept: Tensor = weight) -> Total:
        log.append(1)
        return Total((given(micro) * weight * kept * SCALE * model.weight).sum(), len(micro))

    for wrapped in (loss, partial(loss, kept=weight), Terms(loss)):
        copied = Copied(model, wrapped, torch.float64)
        twin, own = copied.fresh()
        function = own.function if isinstance(own, Terms) else own
        total = function(twin, torch.ones(2, 3, dtype=torch.float64))
        total.sum.backward()
        assert log == []
        assert model.weight.grad is None
        assert copied.named["weight"].grad is not None  # both through the argument and through the cell


def test_tensors_of_a_partial_loss_are_widened() -> None:
    copied = Copied(nn.Linear(1, 1), partial(F.cross_entropy, weight=torch.ones(3)), torch.float64)
    _, loss = copied.fresh()
    assert loss.keywords["weight"].dtype == torch.float64


def test_everything_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    gradient = model[0].weight.grad = torch.ones(2, 2)
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def disturb() -> None:
        model(torch.randn(4, 2)).sum().backward()
        model.eval().requires_grad_(False)
        model[1].running_mean = torch.ones(2)
        model.extra = 1
        model.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            model[0].weight.zero_()
        model[0].weight.grad = None
        raise RuntimeError("afterwards")

    with pytest.raises(RuntimeError, match="afterwards"), untouched(model, nn.MSELoss()):
        disturb()
    assert all(value.equal(values[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model[0].weight.requires_grad
    assert model[0].weight.grad is gradient
    assert not hasattr(model, "extra")
    assert not model._forward_hooks


def test_names_of_trainable_parameters() -> None:
    model, loss = (
        nn.Linear(1, 1),
        nn.LinearCrossEntropyLoss(2, 3) if hasattr(nn, "LinearCrossEntropyLoss") else nn.PReLU(),
    )
    model.bias.requires_grad_(False)
    names = set(named_parameters(model, loss))
    assert "weight" in names
    assert "bias" not in names
    assert any(name.startswith("loss.") for name in names)
