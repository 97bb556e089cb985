"""Sums have memory of their own, whoever else holds that of the first gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anybatch.engine.gradients import InPlace
from tests.engine.test_gradients import WAYS, add, found

SHARED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "with each other": lambda a, b, _: (a.view(-1) + b.view(-1)).square().sum(),
    "parts of one": lambda a, b, _: torch.cat([a, b]).square().sum(),
    "with a leaf of nobody's": lambda a, b, leaf: ((a.view(-1) + leaf.view(-1)) * b).square().sum(),
    "with what a hook holds": lambda a, b, _: (a * b).sum(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHARED)
def test_first_gradients_that_share_memory_are_summed_apart(name: str, way: str) -> None:
    a, b, leaf = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(3))
    if name == "with what a hook holds":
        held = torch.zeros(2)
        a.register_hook(lambda gradient: held.copy_(gradient).detach())
    gradients = WAYS[way]([a, b])
    cotangent = torch.ones(())  # the same for all micro-batches
    for _ in range(3):
        gradients.begin()
        gradients.add([SHARED[name](a, b, leaf)], [cotangent])
    total = found(gradients)
    gradients.close()
    once = torch.autograd.grad(SHARED[name](a, b, leaf), [a, b])
    assert [total[one].tolist() for one in (a, b)] == [(3 * one).tolist() for one in once]
    assert cotangent.item() == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_reaches_the_loss_through_views_only(way: str) -> None:
    """Autograd leaves it a view of the cotangent."""
    number = nn.Parameter(torch.zeros(1))
    gradients = WAYS[way]([number])
    cotangent = torch.ones(())
    for _ in range(3):
        gradients.begin()
        gradients.add([number.squeeze()], [cotangent])
    assert (found(gradients)[number].item(), cotangent.item()) == (3.0, 1.0)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_with_the_negative_bit(way: str) -> None:
    numbers = [nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0)]
    gradients = WAYS[way](numbers)
    for _ in range(2):
        add(gradients, (torch.complex(*numbers).conj() * (3 + 6j)).real)
    total = found(gradients)
    assert [total[one].item() for one in numbers] == [6.0, 12.0]
    assert not any(one.is_neg() for one in total.values())


@pytest.mark.parametrize("is_large_first", [True, False])
def test_of_those_that_share_memory_the_largest_keeps_it(is_large_first: bool) -> None:
    large, small = nn.Parameter(torch.ones(100, 3)), nn.Parameter(torch.ones(1, 3))
    weights = [large, small] if is_large_first else [small, large]
    gradients = InPlace(weights, "loss")
    add(gradients, torch.cat(weights).square().sum())
    total = found(gradients)
    assert [total[one].untyped_storage().nbytes() for one in (large, small)] == [4 * 303, 4 * 3]
