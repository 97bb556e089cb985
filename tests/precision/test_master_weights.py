"""Weight backup: small updates arrive, whatever the optimizer, whoever writes to the weights meanwhile."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Options, Step, Total
from tests.snapshots import changes
from tests.train.runs import raising
from tests.zoo import Made

SHORT = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}
# Whole numbers of eighths, so that 16 bits hold them and every sum of them.
X = torch.arange(-12, 12).reshape(8, 3) / 8


def line() -> Any:
    """Return a model whose gradient does not depend on its weights, so it is the same in every dtype."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
    return Made(lambda self, x: self.first(x) + self.second(x), first=first, second=second)


def mean(model: nn.Module, micro: Any) -> Total:
    return Total(model(micro[0]).float().sum(), len(micro[0]))


Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
SGD, ADAM = partial(torch.optim.SGD, lr=1e-4, momentum=0.9), partial(torch.optim.Adam, lr=1e-4)
OPTIMIZERS: dict[str, Make] = {
    "SGD": SGD,
    "SGD foreach": partial(SGD, foreach=True),
    "Adam": ADAM,
    "Adam fused": partial(ADAM, fused=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4, momentum=0.5, centered=True),
}


def steps(optimizer: Make = SGD, precision: str = "fp16-true") -> list[Step]:
    more: Any = {"micro_batch": 4, "options": Options(check=False)}
    models = [(line(), one) for one in (precision, "float32")]
    return [Step(m, mean, optimizer(m.parameters()), precision=one, **more) for m, one in models]


def update(*steps: Step, times: int = 1) -> None:
    for _ in range(times):
        for step in steps:
            assert step((X,)).updated


def assert_follows(short: Step, full: Step) -> None:
    """The backup is what float32 training gives, and so is the optimizer's state; weights are it, rounded."""
    for mine, theirs in zip(short.model.parameters(), full.model.parameters(), strict=True):
        backup = short.masters.of(mine)
        assert backup is not None
        assert mine.dtype in (torch.float16, torch.bfloat16)
        assert torch.equal(backup, theirs)
        assert torch.equal(mine, theirs.to(mine.dtype))
    mine, theirs = ([one.state_dict() for one in step.optimizers] for step in (short, full))
    assert changes({"state": theirs}, {"state": mine}) == []


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_float32(name: str, precision: str) -> None:
    short, full = steps(OPTIMIZERS[name], precision)
    update(short, full, times=4)
    short.optimizers[0].load_state_dict(copy.deepcopy(short.optimizers[0].state_dict()))  # in float32
    update(short, full)
    assert_follows(short, full)


def load(model: nn.Module, value: float) -> None:
    model.load_state_dict({name: torch.full_like(one, value) for name, one in model.state_dict().items()})


def put_data(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter.data, value)


@pytest.mark.parametrize("is_read", [False, True], ids=["updated", "read, then updated"])
@pytest.mark.parametrize("write", [load, put_data])
def test_the_backup_follows_who_writes_to_the_weights(write: Any, is_read: bool) -> None:
    short, full = steps()
    update(short, full)
    for step in (short, full):
        write(step.model, 0.75)  # 16 bits hold it
    for parameter in short.model.parameters() if is_read else ():
        assert torch.equal(short.masters.of(parameter), torch.full_like(parameter, 0.75).float())
    update(short, full)
    assert_follows(short, full)


@pytest.mark.parametrize("precision", SHORT)
def test_states_hold_the_float32_weights_and_may_be_loaded_in_part(precision: str) -> None:
    short, full = steps(precision=precision)
    update(short, full)
    saved = copy.deepcopy(short.masters.state_dict(short.model))
    assert changes(dict(full.model.state_dict()), saved) == []
    again, _ = steps(precision=precision)
    again.masters.load_state_dict(again.model, saved)
    for mine, theirs in zip(again.model.parameters(), full.model.parameters(), strict=True):
        assert torch.equal(again.masters.of(mine), theirs)
        assert torch.equal(mine, theirs.to(mine.dtype))
    weights = {"first.weight": full.model.first.weight.detach() + 1e-5}
    with pytest.raises(RuntimeError, match="Missing key"):
        short.masters.load_state_dict(short.model, weights)
    found = short.masters.load_state_dict(short.model, weights, strict=False)
    assert found.missing_keys == ["first.bias", "second.weight"]
    assert torch.equal(short.masters.of(short.model.first.weight), weights["first.weight"])


def test_what_fails_in_the_optimizer_leaves_short_weights() -> None:
    short, _ = steps()
    short.optimizers[0].register_step_post_hook(lambda *_: raising(RuntimeError("the optimizer's own"))())
    with pytest.raises(RuntimeError, match="own"):
        short((X,))
    for parameter in short.model.parameters():
        assert parameter.dtype == torch.float16
        assert torch.equal(parameter, short.masters.of(parameter).half())


def test_a_thousand_small_updates_arrive() -> None:
    nn.init.ones_((model := nn.Linear(4, 1, bias=False)).weight)
    plain, x = copy.deepcopy(model).half(), torch.ones(2, 4)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=1e-4) for one in (model, plain))
    step = Step(model, mean, ours, precision="fp16-true", options=Options(check=False))
    for _ in range(1000):
        step((x,))
        plain(x.half()).mean().backward()
        theirs.step()
        theirs.zero_grad()
    assert (model.weight - 0.9).abs().max() <= torch.finfo(torch.float16).eps
    assert torch.equal(plain.weight, torch.ones_like(plain.weight))
