"""Blocks that do not run again as they did are caught; others are compared until they were the same once."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.core.errors import BlockError, PlanError
from anybatch.recompute import Choice, apply_policies
from tests.recompute.models import seed
from tests.snapshots import same

policies = pytest.mark.parametrize("policy", ["recompute", "selective"])


@functools.lru_cache
def table(rows: int) -> Tensor:
    return torch.arange(rows * 4.0).reshape(rows, 4).sin().exp()


def counted(block: Any, x: Tensor) -> Tensor:
    block.counts["calls"] += 1
    return torch.full((4,), float(block.counts["calls"]))


#: What a block multiplies its output by, from a place that a second run may find changed.
FACTORS: dict[str, Callable[[Any, Tensor], Any]] = {
    "generators": lambda block, x: block.draws[0].random() + torch.rand(4, generator=block.draws[1]),
    "dict": counted,
    "cached": lambda block, x: table(len(x)),
    "nan": lambda block, x: torch.tensor([1.0, torch.nan, 1.0, 1.0]),
    "own generator": lambda block, x: block.draw(),
    "tensor": lambda block, x: block.mean.mul_(0.9).clone(),
    "parameter": lambda block, x: block.fixed.mul_(0.9).clone(),
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.draws = [np.random.default_rng(0), torch.Generator().manual_seed(1)]
        self.counts, self.mean = {"calls": 0}, torch.ones(4)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        own = torch.Generator().manual_seed(2)
        self.draw = lambda: torch.rand(4, generator=own)  # where nobody looks

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) * FACTORS[self.kind](self, x)


def every(policy: str) -> Choice:
    return tuple((f"{number}", policy) for number in range(3))


def passes(model: nn.Module, choice: Choice, times: int = 4, **options: Any) -> list[Tensor]:
    table.cache_clear()
    seed(2)
    x = torch.randn(5, 4)
    for _ in range(times):
        with apply_policies(model, choice, **options):
            model(x).square().sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def made(kind: str) -> nn.Sequential:
    seed(1)
    return nn.Sequential(*[Block(kind) for _ in range(3)])


@policies
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["generators", "dict", "cached", "nan"])
def test_what_can_be_put_back_is(kind: str, verify: bool, policy: str) -> None:
    plain, other = made(kind), made(kind)
    expected = passes(plain, ())
    assert all(map(same, expected, passes(other, every(policy), verify=verify)))
    for one, two in zip(plain, other, strict=True):
        assert one.counts == two.counts
        assert one.draws[0].random() == two.draws[0].random()


@policies
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("own generator", r"'2' to compute the same when it is run again.*output 1 of 1.*Look for"),
        ("tensor", r"'0' to write to buffers only, got a Tensor of shape \(4,\)"),
        ("parameter", r"a Parameter of shape \(4,\)"),
    ],
)
def test_what_cannot_is_refused_at_once(kind: str, message: str, verify: bool, policy: str) -> None:
    with pytest.raises(BlockError, match=message) as caught:
        passes(made(kind), every(policy), times=1, verify=verify)
    assert caught.value.block in "012"
    assert isinstance(caught.value, PlanError)


class Writes(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(2, 2), in_place
        self.register_buffer("left", torch.zeros(2, 2))

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        assert x is same  # in the second run as well
        return self.layer(x.mul_(2) if self.in_place else x) @ self.left


@policies
def test_what_is_written_to_between_the_runs_is_refused(policy: str) -> None:
    net, x = nn.ModuleList([Writes(in_place=in_place) for in_place in (True, False)]), torch.ones(3, 2)
    with apply_policies(net, (("0", policy), ("1", policy))):
        with pytest.raises(PlanError, match="'0', which changes one in place"):
            net[0](x, x)
        net[1](x, x).sum().backward()
        loss = net[1](x, x).sum()
        net[1].left.add_(1)
        with pytest.raises(PlanError, match=r"'1'.*shape \(2, 2\)"):
            loss.backward()


def test_a_block_is_compared_first_and_then_when_it_is_said() -> None:
    """It takes one more run."""
    block, found, count = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), list[int](), []
    model = nn.Sequential(block)
    block[0].register_forward_hook(lambda *_: count.append(1))
    for policy in ("recompute", "selective"):
        for verify in (False, False, True, False):
            count.clear()
            with apply_policies(model, (("0", policy),), verify=verify):
                model(torch.ones(1, 4)).sum().backward()
            found.append(len(count))
    assert found == [3, 2, 3, 2, 3, 2, 3, 2]
