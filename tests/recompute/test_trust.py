"""Blocks that do not run again as they did are caught; others are compared twice and then trusted."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from anybatch.core.errors import BlockError, PlanError
from anybatch.recompute.apply import apply_policies
from anybatch.recompute.trust import RUNS, is_fake, mark, trust_in
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

    def factor(self, x: Tensor) -> Any:
        match self.kind:
            case "generators":
                return self.generators[0].random() + torch.rand(4, generator=self.generators[1])  # pyright: ignore
            case "silent buffers":
                self.codes.data.copy_(self.codes @ self.codes / 3.9)
                self.seen.data += 1
                return self.codes[0] * self.seen
            case "dict":
                self.counts["calls"] += 1
                return torch.full((4,), float(self.counts["calls"]))
            case "cached":
                return table(len(x))
            case "shared object":
                return torch.full((4,), Shared.factor)
            case "iterator":
                return next(self.draws)
            case "tensor":
                return self.mean.mul_(0.9).clone()
            case "parameter":
                return self.fixed.mul_(0.9).clone()
            case _:
                return nn.functional.rrelu(x, training=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.factor(x)
        return torch.tanh(self.second(hidden)) if self.kind != "late" else self.factor(hidden)


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


def passes(model: nn.Module, choice: Choice, times: int = 4) -> list[Tensor]:
    table.cache_clear()
    seed(2)
    x = torch.randn(5, 4)
    for _ in range(times):
        with apply_policies(model, choice):
            model(x).square().sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def made(kind: str) -> nn.Module:
    seed(1)
    return Net(kind)


@policies
@pytest.mark.parametrize("kind", ["generators", "silent buffers", "dict", "cached"])
def test_what_can_be_put_back_is(kind: str, policy: str) -> None:
    plain, other = made(kind), made(kind)
    expected = passes(plain, ())
    assert all(map(torch.equal, expected, passes(other, every(policy))))
    for one, two in zip(plain.blocks, other.blocks, strict=True):  # pyright: ignore
        assert one.counts == two.counts
        assert one.generators[0].random() == two.generators[0].random()
        assert trust_in(two, policy).left == 0


@policies
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shared object", r"the same when it is run again.*a result of aten\.full\.default.*Look for"),
        ("iterator", "the same when it is run again"),
        ("tensor", r"a Tensor of shape \(4,\)"),
        ("parameter", r"a Parameter of shape \(4,\)"),
        ("late", "fills what it has saved"),
    ],
)
def test_what_cannot_is_refused(kind: str, message: str, policy: str) -> None:
    with pytest.raises(BlockError, match=message) as caught:
        passes(made(kind), every(policy))
    assert caught.value.block.startswith("blocks.")
    assert isinstance(caught.value, PlanError)


def test_parameters_put_in_the_place_of_a_blocks_own_are_taken_again() -> None:
    model = made("cached")
    others = {name: (2 * one).detach().requires_grad_() for name, one in model.named_parameters()}
    found: list[tuple[Tensor, ...]] = []
    for choice in ((), every("recompute")):
        with apply_policies(model, choice):
            loss = torch.func.functional_call(model, others, (torch.ones(5, 4),)).sum()
            found.append(torch.autograd.grad(loss, [one for one in others.values() if one.dim() == 2]))
    assert all(map(torch.equal, *found))


def test_other_numbers_of_tensors_are_refused() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with apply_policies(nn.Sequential(block), (("0", "recompute"),)):
        loss = block(torch.ones(1, 4)).sum()
        block[1] = nn.Identity()
        with pytest.raises(BlockError, match="'0' to save the same tensors"):
            loss.backward()


def test_an_error_in_the_second_run_names_the_block() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with apply_policies(nn.Sequential(block), (("0", "recompute"),)):
        loss = block(torch.ones(1, 4)).sum()
        block.insert(0, nn.Linear(3, 3))
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    assert "'0' was run again" in caught.value.__notes__[0]


def test_trust_is_earned_and_of_one_policy_and_mode() -> None:
    model = made("cached")
    block = model.get_submodule("blocks.0")
    for left in range(RUNS, -1, -1):
        assert trust_in(block, "recompute").left == left
        passes(model, every("recompute"), times=1)
    assert trust_in(block, "recompute").left == 0
    assert trust_in(block, "selective").left == RUNS
    block.eval()
    assert trust_in(block, "recompute").left == RUNS


def test_nothing_is_compared_on_fake_tensors() -> None:
    assert not is_fake()
    with FakeTensorMode():
        assert is_fake()
        model = Net("dict")
        with apply_policies(model, every("recompute")):
            model(torch.randn(5, 4)).sum().backward()
    assert trust_in(model.blocks[0], "recompute").left == RUNS


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda x: torch.cat([x[:1].nextafter(x[:1] + 1), x[1:]]),
    "order": lambda x: x.flip(0),
    "order of columns": lambda x: x[:, [0, 2, 1, 3]],
    "signs": lambda x: -x,
    "shape": lambda x: x.reshape(4, -1),
    "dtype": lambda x: x.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_marks_tell_tensors_apart(change: str) -> None:
    x = torch.ones(8, 4) if change == "signs" else torch.randn(8, 4)
    assert mark(x) != mark(CHANGES[change](x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
def test_marks_of_equals_are_equal(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).to(dtype)
    assert mark(x.t()) == mark(x.clone().t())
    assert mark(torch.full((2,), float("nan"))) == mark(torch.full((2,), float("nan")))
