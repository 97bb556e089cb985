"""Distances of outcomes: relative to the reference, or to parts of its rows where these cancel."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.trial import distance
from tests.audit.test_look import step_on
from tests.device import needs_cpu
from tests.zoo import Made


def outcome(gradient: float, loss: float = 1.0, **more: Any) -> Any:
    """An outcome of one weight in float32, or of `more` than one."""
    gradients = {"weight": torch.tensor([gradient, 0.0])} | {k: torch.tensor(v) for k, v in more.items()}
    size = math.hypot(*[one.norm().item() for one in gradients.values()])
    report = SimpleNamespace(loss=loss, terms={"loss": loss})
    given: Any = {"gradient": gradients, "size": size, "scale": abs(loss), "report": report}
    return SimpleNamespace(**given, rows=8, dtypes={torch.float32})


def test_distance_is_relative_to_the_reference_or_to_a_larger_part() -> None:
    found = distance(outcome(4.0), outcome(5.0, 1.5))
    assert (found.gradient, found.loss, found.worst) == (0.25, 0.5, "weight")
    found = distance(outcome(4.0), outcome(5.0, 1.5), outcome(10.0, -2.0))
    assert (found.gradient, found.loss) == (0.1, 0.25)
    assert distance(outcome(1.0), outcome(1.0, bias=2.0)).worst == "bias"
    assert distance(outcome(0.0), outcome(1.0)).gradient == math.inf
    assert distance(outcome(0.0, math.nan), outcome(0.0, math.nan))[:2] == (0.0, 0.0)
    assert distance(outcome(1.0), outcome(math.nan, math.nan))[:2] == (math.inf, math.inf)


@needs_cpu
def test_a_small_hidden_loss_is_told_with_its_parameter_and_size() -> None:
    """An auxiliary loss that reaches only the gate, in backward: under one per cent of the whole gradient."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, hidden: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], torch.tensor(1e-3)

    def forward(self: Any, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(1).mean(0)
        return Hidden.apply(self.out(x), (share * share.detach()).sum())

    batch = torch.randn(32, 4), torch.randint(3, (32,))
    model = Made(forward, gate=nn.Linear(4, 4), out=nn.Linear(4, 3))
    with pytest.warns(UserWarning, match=r"differ by \S+, most in gate\.\w+ \(by 0\.\d+ of its own\) for 8"):
        _, report = step_on(model, nn.CrossEntropyLoss(), batch, 2)
    assert not report.checked
