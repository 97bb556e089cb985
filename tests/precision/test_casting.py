"""Casts at the doors of a model: which values, in which nests, and what is never rounded."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Precision, Step
from anybatch.core import tree
from anybatch.precision.apply import lower
from anybatch.precision.policy import find_precision
from anybatch.recompute.blocks import POLICIES
from tests.options import flat
from tests.snapshots import changes
from tests.zoo import Made

BF16 = find_precision("bf16-true")


# ---- nests


@dataclass
class Record:
    x: Tensor


def nested() -> Any:
    def forward(self: Any, value: Any, *, more: Any = None) -> Any:
        self.seen = value, more
        return value, more

    return Made(forward, linear=nn.Linear(2, 2))


def test_a_nest_is_cast_at_both_doors_and_keeps_its_classes() -> None:
    model, value = nested(), {"a": torch.ones(2), "b": (Record(torch.zeros(1)), [torch.ones(1)])}
    lower(model, BF16, [])
    back = model(value, more=value)
    assert repr(back) == repr((value, value))  # ones and zeros survive
    for nest, dtype in ((model.seen, torch.bfloat16), (back, torch.float32)):
        assert [leaf.dtype for leaf in tree.flatten(nest).leaves] == [dtype] * 6


def test_what_is_no_float_goes_through() -> None:
    model = nested()
    lower(model, find_precision("fp16-true"), [])
    tokens, mask, record = torch.arange(3), torch.tensor([True]), Record(torch.arange(3))
    module, kind = nn.Linear(1, 1), Record
    for value in (tokens, mask, record, {"x": tokens}, [mask], "word", 3, None, module, kind):
        assert model(value)[0] is value


# ---- what is never rounded

YEARS = torch.tensor([[2011.0, 17.3, 1.0], [2016.0, 1029.7, 0.1], [2017.0, 1030.1, 0.7], [2024.0, 3.0, 0.2]])
YEARS = YEARS.bfloat16().float()  # inputs are rounded at the door
KEPT = Precision(store="bfloat16", keep_float32=("*kept*",))


def column() -> nn.Module:
    """Return a layer that tells apart values that 8 bits do not tell apart."""
    return Made(lambda self, x: (x - 2016.5).tanh())


def lowered(after: Any = None) -> tuple[Any, Any]:
    """Return a model that ends in a part in float32 and what may come after it; and the same in float32."""
    forward = lambda self, x: self.kept(x) if after is None else after(self.kept(x))  # noqa: E731
    kept = nn.Sequential(column(), nn.Linear(3, 3))
    full = copy.deepcopy(model := Made(forward, kept=kept, linear=nn.Linear(3, 3)))
    lower(model, KEPT, model.parameters())
    return model, full


MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])


@MODES
def test_what_the_last_part_gives_is_not_rounded(mode: Callable[[], Any]) -> None:
    model, full = lowered()
    with mode():
        assert torch.equal(model(YEARS), full(YEARS))
        assert torch.equal(model(YEARS.double()), full(YEARS))


@MODES
@pytest.mark.parametrize(
    "change", [Tensor.neg_, lambda x: x + 0, lambda x: x[:]], ids=["in place", "new", "part"]
)
def test_what_the_model_makes_of_it_is_rounded(change: Any, mode: Callable[[], Any]) -> None:
    """As all that flows between modules."""
    model, _ = lowered(after=change)
    with mode():
        left = model(YEARS)
        assert torch.equal(left, left.bfloat16().float())


def after_steps(kind: bool | None = None, **options: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
        return x

    torch.manual_seed(0)
    block = nn.Sequential(nn.Sequential(column(), nn.Linear(3, 3)), nn.Linear(3, 3), nn.Tanh())
    model = Made(forward, blocks=nn.ModuleList([block, copy.deepcopy(block)]))
    precision = Precision(store="bfloat16", keep_float32=("blocks.*.0",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.MSELoss(), optimizer, precision=precision, micro_batch=2, **flat(options))
    for _ in range(4):
        step((YEARS, torch.ones(4, 3)))
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "options",
    [{"kind": False}, *({"recompute": {"blocks.?": policy}} for policy in POLICIES)],
    ids=["torch's checkpoint", *POLICIES],
)
def test_blocks_that_run_again_take_what_they_took(options: dict[str, Any]) -> None:
    assert changes(after_steps(), after_steps(**options)) == []


def test_the_older_checkpoint_takes_the_same_twice() -> None:
    """It runs a block without gradients first, and then on tensors of its own."""
    model, seen = nn.Sequential(column(), nn.Linear(3, 3)), []
    whole = nn.Sequential(nn.Sequential(model), nn.Linear(3, 3))
    ask = torch.ones((), requires_grad=True)  # it wants an argument that asks for a gradient
    whole.forward = lambda x: whole[1](checkpoint(lambda y, _: whole[0](y), x, ask, use_reentrant=True))
    lower(whole, Precision(store="bfloat16", keep_float32=("0.0",)), [])
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    whole(YEARS).sum().backward()
    assert len(seen) == 2
    assert all(torch.equal(one, YEARS.bfloat16().float()) for one in seen)


def test_no_byte_is_held_afterwards() -> None:
    model, _ = lowered()
    rows = YEARS.clone()
    with torch.no_grad():
        output = model(rows)
    gone = weakref.ref(rows), weakref.ref(output)
    gc.disable()  # nor does it hang in a cycle
    del rows, output
    gc.enable()
    assert [one() for one in gone] == [None, None]
