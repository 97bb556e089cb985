"""The rules of an asynchronous server: what each adds, that all are plain SGD alone, and what they refuse."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anybatch.core import PlanError
from anybatch.parallel import RuleName, make_rule

NAMES = get_args(RuleName)
COUNTS = st.integers(0, 50), st.integers(1, 50), st.integers(0, 2**31)


def drawn(seed: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(33, generator=generator, dtype=dtype) for _ in range(count)]


def added(name: RuleName, parameters: Tensor, pushed: Tensor, **counts: int) -> Tensor:
    result = parameters.clone()
    make_rule(name).apply(result, pushed, **counts)
    return result


@given(*COUNTS)
def test_each_rule_divides_by_its_own_count(staleness: int, steps: int, seed: int) -> None:
    """Mutation: a divisor of another rule, a product with the reciprocal, `=` in place of `+=`."""
    parameters, pushed = drawn(seed, 2)
    divisors = {"accumulate": 1, "normalize": steps, "dynsgd": staleness + 1}
    for name, divisor in divisors.items():
        found = added(name, parameters, pushed, staleness=staleness, steps=steps)
        assert torch.equal(found, parameters + pushed / divisor)


@pytest.mark.parametrize(
    ("pushed", "message"),
    [
        (torch.ones(32), r"shape \(33,\).*got \(32,\)"),
        (torch.ones(1), r"shape \(33,\).*got \(1,\)"),  # torch would add it to every place
        (torch.ones(33).index_fill(0, torch.tensor([4]), math.nan), "in 1 of 33"),
        (torch.ones(33).index_fill(0, torch.tensor([4, 5]), -math.inf), "in 2 of 33"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_pushes_are_refused_and_add_nothing(name: RuleName, pushed: Tensor, message: str) -> None:
    before = torch.arange(33.0)
    parameters = before.clone()
    with pytest.raises(PlanError, match=message):
        make_rule(name).apply(parameters, pushed, staleness=3, steps=2)
    assert torch.equal(parameters, before)
