"""Sums have memory of their own, whoever else holds that of the first gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_gradients import add, make

SHARED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "with each other": lambda a, b, _: (a.view(-1) + b.view(-1)).square().sum(),
    "parts of one": lambda a, b, _: torch.cat([a, b]).square().sum(),
    "with a leaf of nobody's": lambda a, b, leaf: ((a.view(-1) + leaf.view(-1)) * b).square().sum(),
    "with what a hook holds": lambda a, b, _: (a * b).sum(),
}


@pytest.mark.parametrize("bucket", [None, 1, math.inf])
@pytest.mark.parametrize("name", SHARED)
def test_first_gradients_that_share_memory_are_summed_apart(name: str, bucket: float | None) -> None:
    a, b, leaf = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(3))
    if name == "with what a hook holds":
        held = torch.zeros(2)
        a.register_hook(lambda gradient: held.copy_(gradient).detach())
    gradients = make([a, b], bucket=bucket)
    scale = 8.0 if bucket else 1.0
    cotangent = torch.full((), scale)  # the same for all micro-batches
    for _ in range(3):
        gradients.begin()
        gradients.add([SHARED[name](a, b, leaf)], [cotangent], unscale=1 / scale)
    found = gradients.finish({})
    once = torch.autograd.grad(SHARED[name](a, b, leaf), [a, b])
    assert [found[one].tolist() for one in (a, b)] == [(3 * one).tolist() for one in once]
    assert cotangent.item() == scale


@pytest.mark.parametrize("bucket", [None, 1, math.inf])
def test_a_parameter_that_reaches_the_loss_through_views_only(bucket: float | None) -> None:
    """Autograd leaves it a view of the cotangent."""
    number = nn.Parameter(torch.zeros(1))
    gradients = make([number], bucket=bucket)
    cotangent = torch.ones(())
    for _ in range(3):
        gradients.begin()
        gradients.add([number.squeeze()], [cotangent])
    assert (gradients.finish({})[number].item(), cotangent.item()) == (3.0, 1.0)


@pytest.mark.parametrize("bucket", [None, 1, math.inf])
def test_gradients_with_the_negative_bit(bucket: float | None) -> None:
    numbers = [nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0)]
    gradients = make(numbers, bucket=bucket)
    for _ in range(2):
        gradients.begin()
        add(gradients, (torch.complex(*numbers).conj() * (3 + 6j)).real)
    found = gradients.finish({})
    assert [found[one].item() for one in numbers] == [6.0, 12.0]
    assert not any(one.is_neg() for one in found.values())


@pytest.mark.parametrize("is_large_first", [True, False])
def test_of_those_that_share_memory_the_largest_keeps_it(is_large_first: bool) -> None:
    large, small = nn.Parameter(torch.ones(100, 3)), nn.Parameter(torch.ones(1, 3))
    weights = [large, small] if is_large_first else [small, large]
    gradients = make(weights)
    add(gradients, torch.cat(weights).square().sum())
    found = gradients.finish({})
    assert [found[one].untyped_storage().nbytes() for one in (large, small)] == [4 * 303, 4 * 3]
