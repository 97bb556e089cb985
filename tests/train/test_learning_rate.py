"""The learning rate for another batch size, and its warm-up, alone and joined with other schedulers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LRScheduler, SequentialLR, StepLR

from anybatch.core.errors import PlanError
from anybatch.testing import relative_error, tolerance
from anybatch.train.learning_rate import RULES, scale, warm_up

RATES, SIZES = st.floats(1e-6, 10), st.integers(1, 10**6)


@given(RATES, SIZES, SIZES)
def test_linear_keeps_the_rate_per_row(lr: float, size: int, base: int) -> None:
    scaled = scale(lr, batch_size=size, base_batch_size=base)
    assert relative_error(scaled / size, lr / base) <= tolerance(torch.float64, 1)


@given(RATES, SIZES, SIZES)
def test_square_root_keeps_the_squared_rate_per_row(lr: float, size: int, base: int) -> None:
    scaled = scale(lr, batch_size=size, base_batch_size=base, rule="square-root")
    assert relative_error(scaled**2 / size, lr**2 / base) <= tolerance(torch.float64, 1)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_batch_size_changes_nothing(rule: str) -> None:
    assert scale(0.1, batch_size=96, base_batch_size=96, rule=rule) == 0.1


@pytest.mark.parametrize("name", ["lr", "batch_size", "base_batch_size"])
@pytest.mark.parametrize("value", [0, -1, math.inf, -math.inf, math.nan])
def test_what_is_not_positive_is_refused(name: str, value: float) -> None:
    values: dict[str, Any] = {"lr": 0.1, "batch_size": 64, "base_batch_size": 32, name: value}
    with pytest.raises(PlanError, match=f"{name} .*got {value}"):
        scale(values.pop("lr"), **values)


@pytest.mark.parametrize("rule", ["", "sqrt", "Linear"])
def test_an_unknown_rule_is_refused_with_the_known_ones(rule: str) -> None:
    with pytest.raises(PlanError, match=f"got {rule!r}.*linear.*square-root"):
        scale(0.1, batch_size=64, base_batch_size=32, rule=rule)


def make_optimizer(*rates: float) -> Optimizer:
    return SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def run(optimizer: Optimizer, scheduler: LRScheduler, updates: int) -> list[list[float]]:
    """The learning rate of each group at each update."""
    used = []
    for _ in range(updates):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("updates", [1, 2, 5, 100])
def test_update_k_of_the_warm_up_uses_k_parts_of_the_rate(updates: int) -> None:
    optimizer = make_optimizer(0.4, 0.01)
    used = run(optimizer, warm_up(optimizer, updates=updates), updates + 5)
    for k, rates in enumerate(used, start=1):
        share = min(k / updates, 1)
        assert relative_error(rates, [0.4 * share, 0.01 * share]) <= tolerance(torch.float64, updates)
    assert all(rates == used[-1] for rates in used[updates - 1 :])  # then it stays, to the bit


@pytest.mark.parametrize("updates", [0, -3, 1.5, True, math.nan, "3"])
def test_a_warm_up_over_no_number_of_updates_is_refused(updates: Any) -> None:
    optimizer = make_optimizer(0.4)
    with pytest.raises(PlanError, match=f"got {updates!r}"):
        warm_up(optimizer, updates=updates)
    assert optimizer.param_groups[0]["lr"] == 0.4
    assert "initial_lr" not in optimizer.param_groups[0]


OTHERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=12),
    "steps": lambda optimizer: StepLR(optimizer, step_size=3, gamma=0.5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_before_another_scheduler_it_only_delays_it(name: str) -> None:
    optimizer, alone = make_optimizer(0.4), make_optimizer(0.4)
    parts = [warm_up(optimizer, updates=4), OTHERS[name](optimizer)]
    joined = run(optimizer, SequentialLR(optimizer, parts, milestones=[4]), 12)
    expected = [[0.1], [0.2], [0.3], [0.4], *run(alone, OTHERS[name](alone), 8)]
    assert relative_error(joined, expected) <= tolerance(torch.float64, 12)


def test_together_with_another_scheduler_the_shares_multiply() -> None:
    optimizer, alone = make_optimizer(0.4), make_optimizer(0.4)
    parts = [warm_up(optimizer, updates=4), OTHERS["steps"](optimizer)]
    joined = run(optimizer, ChainedScheduler(parts), 8)
    other = run(alone, OTHERS["steps"](alone), 8)
    expected = [[rate[0] * min(k / 4, 1)] for k, rate in enumerate(other, start=1)]
    assert relative_error(joined, expected) <= tolerance(torch.float64, 8)
