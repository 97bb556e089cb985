"""Blocks that do not run again as they did are caught; others are compared until they were the same once."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from anybatch.core.errors import BlockError, PlanError
from anybatch.recompute import apply_policies
from tests.recompute.models import seed

policies = pytest.mark.parametrize("policy", ["recompute", "selective"])
Choice = tuple[tuple[str, str], ...]


class Shared:
    """An object that others change."""

    factor = 1.0


@functools.lru_cache
def table(rows: int) -> Tensor:
    return torch.arange(rows * 4.0).reshape(rows, 4).sin().exp()


class Block(nn.Module):
    """Says what it multiplies by."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.register_buffer("codes", torch.ones(4, 4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.generators = [np.random.default_rng(0), torch.Generator().manual_seed(1)]
        self.counts = {"calls": 0}
        self.draws = iter([torch.rand(4) for _ in range(50)])
        self.mean = torch.ones(4)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        own = torch.Generator().manual_seed(2)
        self.draw = lambda: torch.rand(4, generator=own)  # where nobody looks
        self.late = nn.RReLU() if kind == "late" else None
        self.calls = 0

    def factor(self, x: Tensor) -> Any:
        match self.kind:
            case "generators":
                return self.generators[0].random() + torch.rand(4, generator=self.generators[1])  # pyright: ignore
            case "silent counter":
                self.seen.data += 1
                return self.seen
            case "dict":
                self.counts["calls"] += 1
                return torch.full((4,), float(self.counts["calls"]))
            case "cached":
                return table(len(x))
            case "own generator":
                return self.draw()
            case "silent buffer":
                self.codes.data.copy_(self.codes @ self.codes / 3.9)
                return self.codes[0]
            case "shared object":
                return torch.full((4,), Shared.factor)
            case "iterator":
                return next(self.draws)
            case "tensor":
                return self.mean.mul_(0.9).clone()
            case "parameter":
                return self.fixed.mul_(0.9).clone()
            case "nan":
                return torch.tensor([1.0, torch.nan, 1.0, 1.0])
            case _:
                return torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.factor(x)
        return hidden if self.late is None else self.late(hidden)


class Net(nn.Module):
    """Three blocks, and an object that changes from one to the next."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(kind) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            Shared.factor = number + 1.0
            x = block(x)
        return x


def every(policy: str) -> Choice:
    return tuple((f"blocks.{number}", policy) for number in range(3))


def passes(model: nn.Module, choice: Choice, times: int = 4, **options: Any) -> list[Tensor]:
    table.cache_clear()
    seed(2)
    x = torch.randn(5, 4)
    for _ in range(times):
        with apply_policies(model, choice, **options):
            model(x).square().sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def made(kind: str) -> nn.Module:
    seed(1)
    return Net(kind)


@policies
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["generators", "silent counter", "dict", "cached", "late"])
def test_what_can_be_put_back_is(kind: str, verify: bool, policy: str) -> None:
    plain, other = made(kind), made(kind)
    expected = passes(plain, ())
    assert all(map(torch.equal, expected, passes(other, every(policy), verify=verify)))
    for one, two in zip(plain.blocks, other.blocks, strict=True):  # pyright: ignore
        assert one.counts == two.counts
        assert one.generators[0].random() == two.generators[0].random()


@policies
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("own generator", r"'blocks.2' to compute the same when it is run again.*output 1 of 1.*Look for"),
        ("silent buffer", "the same when it is run again"),
        ("shared object", "'blocks.1' to compute the same when it is run again"),
        ("iterator", "the same when it is run again"),
        ("tensor", r"'blocks.0' to write to buffers only, got a Tensor of shape \(4,\)"),
        ("parameter", r"a Parameter of shape \(4,\)"),
    ],
)
def test_what_cannot_is_refused_in_its_first_second_run(
    kind: str, message: str, verify: bool, policy: str
) -> None:
    with pytest.raises(BlockError, match=message) as caught:
        passes(made(kind), every(policy), times=1, verify=verify)
    assert caught.value.block.startswith("blocks.")
    assert isinstance(caught.value, PlanError)


class Writes(nn.Module):
    """Writes to its argument, or has a buffer that others write to."""

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


def test_not_a_number_is_the_same_as_itself() -> None:
    passes(made("nan"), every("recompute"))


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (nn.Flatten(0), "output 1 of 1"),
        (nn.Linear(4, 4), "output 1 of 1"),
        (nn.Linear(3, 3), "mat1 and mat2"),
    ],
)
def test_an_output_of_another_shape_or_value_and_an_error_are_refused_by_name(
    added: nn.Module, message: str
) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with apply_policies(nn.Sequential(block), (("0", "recompute"),)):
        loss = block(torch.ones(1, 4)).sum()
        block.append(added)
        with pytest.raises((BlockError, RuntimeError), match=message) as caught:
            loss.backward()
    assert "'0'" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))


def test_parameters_put_in_the_place_of_a_blocks_own_are_taken_again() -> None:
    model = made("cached")
    others = {name: (2 * one).detach().requires_grad_() for name, one in model.named_parameters()}
    found: list[tuple[Tensor, ...]] = []
    for choice in ((), every("recompute")):
        with apply_policies(model, choice):
            loss = torch.func.functional_call(model, others, (torch.ones(5, 4),)).sum()
            found.append(torch.autograd.grad(loss, [one for one in others.values() if one.dim() == 2]))
    assert all(map(torch.equal, *found))


def test_a_block_is_compared_first_and_then_when_it_is_said() -> None:
    """It takes one more run."""
    block, found = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
    model, count = nn.Sequential(block), []
    block[0].register_forward_hook(lambda *_: count.append(1))

    def runs(policy: str, verify: bool) -> int:
        count.clear()
        with apply_policies(model, (("0", policy),), verify=verify):
            model(torch.ones(1, 4)).sum().backward()
        return len(count)

    for policy in ("recompute", "selective"):
        found += [runs(policy, verify) for verify in (False, False, True, False)]
    model.eval()
    found += [runs("recompute", verify=False) for _ in range(2)]
    assert found == [3, 2, 3, 2, 3, 2, 3, 2, 3, 2]


def test_an_output_that_was_changed_in_place_is_compared_another_time() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), torch.ones(3, 4)
    found: list[Tensor] = []
    for choice in ((), (("0", "recompute"),)):
        torch.manual_seed(0)
        with apply_policies(model, choice):
            found += torch.autograd.grad(model(x).mul_(2).square().sum(), [*model.parameters()])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_nothing_is_compared_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = Net("own generator")
        with apply_policies(model, every("recompute")):
            model(torch.randn(5, 4)).sum().backward()
