"""The rules of an asynchronous server: what each adds, that all are plain SGD alone, and what they refuse."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anybatch.core import PlanError
from anybatch.parallel import RuleName, make_rule
from anybatch.testing import tolerance

NAMES = get_args(RuleName)
FLOAT64 = tolerance(torch.float64, 4)
COUNTS = st.integers(0, 50), st.integers(1, 50), st.integers(0, 2**31)


def drawn(seed: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(33, generator=generator, dtype=dtype) for _ in range(count)]


def added(name: RuleName, parameters: Tensor, pushed: Tensor, **counts: int) -> Tensor:
    result = parameters.clone()
    make_rule(name).apply(result, pushed, **counts)
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_fresh_local_update_is_plain_sgd_to_the_bit(name: RuleName, dtype: torch.dtype) -> None:
    """Mutation: `staleness + 1` without the 1, `steps + 1`, a sign."""
    start, *gradients = drawn(0, 6, dtype)
    ours, theirs = start.clone(), start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.125)  # a power of two, so that the product is not rounded
    for theirs.grad in gradients:
        optimizer.step()
        make_rule(name).apply(ours, -0.125 * theirs.grad, staleness=0, steps=1)
    assert torch.equal(ours, theirs.detach())


@given(*COUNTS)
def test_each_rule_divides_by_its_own_count(staleness: int, steps: int, seed: int) -> None:
    """Mutation: a divisor of another rule, a product with the reciprocal, `=` in place of `+=`."""
    parameters, pushed = drawn(seed, 2)
    divisors = {"accumulate": 1, "normalize": steps, "dynsgd": staleness + 1}
    for name, divisor in divisors.items():
        found = added(name, parameters, pushed, staleness=staleness, steps=steps)
        assert torch.equal(found, parameters + pushed / divisor)


@given(*COUNTS)
def test_pushes_add_up(staleness: int, steps: int, seed: int) -> None:
    """Two pushes one after the other are their sum at once, and a push and its negative are none."""
    parameters, first, second = drawn(seed, 3)
    counts = {"staleness": staleness, "steps": steps}
    for name in NAMES:
        in_turn = added(name, added(name, parameters, first, **counts), second, **counts)
        at_once = added(name, parameters, first + second, **counts)
        torch.testing.assert_close(in_turn, at_once, rtol=FLOAT64, atol=FLOAT64)
        undone = added(name, added(name, parameters, first, **counts), -first, **counts)
        torch.testing.assert_close(undone, parameters, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_updated_as_the_whole(name: RuleName) -> None:
    """A server that holds a part of the parameters does with its part what one server does with all."""
    parameters, pushed = drawn(3, 2)
    shards = zip(parameters.split(10), pushed.split(10), strict=True)
    found = [added(name, *shard, staleness=4, steps=7) for shard in shards]
    assert torch.equal(torch.cat(found), added(name, parameters, pushed, staleness=4, steps=7))


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


@pytest.mark.parametrize("name", ["downpour", "", None, 3])
def test_an_unknown_rule_names_those_there_are(name: Any) -> None:
    with pytest.raises(PlanError, match=r"accumulate, normalize, dynsgd, got .*" + repr(name)):
        make_rule(name)
