"""The learning rate for another batch size, and its warm-up, alone and joined with other schedulers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core.errors import PlanError
from anybatch.testing import relative_error, tolerance
from anybatch.train.learning_rate import RULES, scale, warm_up

SIZES = st.integers(1, 10**6)


@given(st.floats(1e-6, 10), SIZES, SIZES)
def test_linear_keeps_the_rate_per_row_and_square_root_its_square(lr: float, size: int, base: int) -> None:
    linear, root = (scale(lr, batch_size=size, base_batch_size=base, rule=rule) for rule in RULES)
    assert relative_error(linear / size, lr / base) <= tolerance(torch.float64, 1)
    assert relative_error(root**2 / size, lr**2 / base) <= tolerance(torch.float64, 1)
    assert {scale(lr, batch_size=base, base_batch_size=base, rule=rule) for rule in RULES} == {lr}


@pytest.mark.parametrize("name", ["lr", "batch_size", "base_batch_size"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_what_is_not_positive_is_refused(name: str, value: float) -> None:
    values: dict[str, Any] = {"lr": 0.1, "batch_size": 64, "base_batch_size": 32, name: value}
    with pytest.raises(PlanError, match=f"{name} .*got {value}"):
        scale(values.pop("lr"), **values)
    with pytest.raises(PlanError, match=r"got 'sqrt'.*linear.*square-root"):
        scale(0.1, batch_size=64, base_batch_size=32, rule="sqrt")


def make_optimizer(*rates: float) -> Optimizer:
    return SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def run(optimizer: Optimizer, scheduler: LRScheduler, updates: int) -> list[list[float]]:
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


@pytest.mark.parametrize("updates", [0, 1.5, True, "3"])
def test_a_warm_up_over_no_number_of_updates_is_refused(updates: Any) -> None:
    optimizer = make_optimizer(0.4)
    with pytest.raises(PlanError, match=f"got {updates!r}"):
        warm_up(optimizer, updates=updates)
    assert optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"]) == 0.4
