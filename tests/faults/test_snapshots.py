"""The snapshot that all tests of faults rely on sees every kind of change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anybatch import Step
from tests.snapshots import changes, make_step, same, snapshot


def momentum(step: Step) -> dict[str, Any]:
    return next(iter(step.optimizers[0].state.values()))


CHANGES: dict[str, Callable[[Step], Any]] = {
    "buffer 1.running_mean": lambda step: step.model[1].running_mean.add_(1e-6),
    "parameter 0.weight": lambda step: step.model[0].weight.data[0, 0].add_(1e-6),
    "gradient 0.weight": lambda step: step.model[0].weight.grad.add_(1),
    "identity 4.bias": lambda step: setattr(step.model[4].bias, "grad", step.model[4].bias.grad.clone()),
    "buffer 1.new": lambda step: step.model[1].register_buffer("new", torch.ones(1)),
    "mode of 3": lambda step: step.model[3].eval(),
    "0": lambda step: step.optimizers[0].param_groups[0].update(lr=0.2),
    "optimizer 0": lambda step: momentum(step)["momentum_buffer"].add_(1),
    "scheduler 0": lambda step: setattr(step.schedulers[0], "last_epoch", 9),
    "random state": lambda step: torch.rand(1),
    "on gradient 0.weight": lambda s: s.model[0].weight.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen_alone(name: str) -> None:
    step = make_step()
    before = snapshot(step)
    assert changes(before, snapshot(step)) == []
    CHANGES[name](step)
    (changed,) = changes(before, snapshot(step))
    assert changed.endswith(name)


def test_sameness_is_of_bits() -> None:
    nan = torch.tensor(float("nan"))
    assert same({"a": [nan, float("nan")]}, {"a": [nan.clone(), float("nan")]})
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same((1, 2), [1, 2])
    assert not same({"a": 1}, {"a": 1, "b": 2})
