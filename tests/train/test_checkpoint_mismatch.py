"""A checkpoint of another model, optimizer or scheduler is refused by name, before anything is touched."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core.errors import CheckpointError
from anybatch.train.checkpoint import load, restore, save
from tests.snapshots import same

Optimizers, Schedulers = list[Optimizer], list[LRScheduler]


class Net(nn.Module):
    def __init__(self, *, width: int = 3, dtype: torch.dtype = torch.float32, tied: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(3, width, dtype=dtype)
        self.two = nn.Linear(3, width, dtype=dtype)
        if tied:
            self.two.weight = self.one.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Refusing(Net):
    """Loads its parameters, then refuses."""

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("refused")


def sgd(model: nn.Module) -> Optimizers:
    return [optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def steps(optimizers: Optimizers) -> Schedulers:
    return [lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]


def sequence(*parts: int) -> Callable[[Optimizers], Schedulers]:
    def make(optimizers: Optimizers) -> Schedulers:
        inner = [lr_scheduler.StepLR(optimizers[0], size) for size in parts]
        return [lr_scheduler.SequentialLR(optimizers[0], inner, milestones=list(range(1, len(parts))))]

    return make


def groups(*names: str) -> Callable[[nn.Module], Optimizers]:
    def make(model: nn.Module) -> Optimizers:
        parts = [{"params": list(getattr(model, name).parameters())} for name in names]
        return [optim.SGD(parts, lr=0.1, momentum=0.9)]

    return make


Parts = dict[str, Any]  # what differs from a `Net`, its optimizer and its scheduler


def prepare(parts: Parts) -> tuple[nn.Module, Optimizers, Schedulers]:
    """Three updates, so that there is a state to lose."""
    model = parts.get("model", Net)()
    optimizers = parts.get("optimizers", sgd)(model)
    schedulers = parts.get("schedulers", steps if optimizers else lambda _: [])(optimizers)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        for part in (*optimizers, *schedulers):
            part.step()
    return model, optimizers, schedulers


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({"model": lambda: nn.Linear(3, 3)}, {}, "checkpoint of this Net, .*one.bias: nothing there"),
        ({"model": partial(Net, width=4)}, {}, r"one.bias: float32 \(4,\) there, float32 \(3,\) here"),
        (
            {},
            {"model": partial(Net, tied=True)},
            "one.weight and two.weight: two values there, one tied parameter here",
        ),
        (
            {"optimizers": lambda m: [optim.AdamW(m.parameters())]},
            {},
            r"optimizers \['SGD'\], got \['AdamW'\]",
        ),
        ({"optimizers": groups("one", "two")}, {}, r"groups of \[4\] parameters, got \[2, 2\]"),
        (
            {"optimizers": groups("one", "two")},
            {"optimizers": groups("two", "one")},
            "two.weight where it has one.weight",
        ),
        ({"schedulers": sequence(2, 3)}, {}, r"schedulers \['StepLR'\], got \['SequentialLR'\]"),
        (
            {"schedulers": sequence(2, 3, 4)},
            {"schedulers": sequence(2, 3)},
            "schedulers take, got IndexError",
        ),
        # Too late for its own parameters, but optimizers and schedulers go back.
        ({"model": Refusing}, {"model": Refusing}, "RuntimeError: refused"),
    ],
    ids=map(str, range(9)),
)
def test_another_model_optimizer_or_scheduler_is_refused(
    tmp_path: Path, there: Parts, here: Parts, message: str
) -> None:
    """And what it was to be restored into is as it was, to the bit."""
    path = tmp_path / "a.safetensors"
    model, optimizers, schedulers = prepare(there)
    save(path, model=model, optimizers=optimizers, schedulers=schedulers)
    model, optimizers, schedulers = prepare(here)
    parts = (*optimizers, *schedulers)
    found = load(path)
    weights = copy.deepcopy(dict(model.state_dict()))
    before = copy.deepcopy([part.state_dict() for part in parts])
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: expected .*{message}.*[.] \w") as caught:
        restore(found, model=model, optimizers=optimizers, schedulers=schedulers)
    if not isinstance(model, Refusing):
        assert same(dict(model.state_dict()), weights), caught.value
    assert same([part.state_dict() for part in parts], before)
    for part in parts:
        part.step()  # and it still works


def test_many_differences_are_cut_short(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(100)])
    save(tmp_path / "a", model=model)
    with pytest.raises(CheckpointError, match="and 197 more") as caught:
        restore(load(tmp_path / "a"), model=nn.ModuleList())
    assert len(str(caught.value)) <= 300 + len(str(tmp_path))


def test_ties_there_may_be_two_parameters_here(tmp_path: Path) -> None:
    one, other = Net(tied=True), Net()
    save(tmp_path / "a", model=one)
    restore(load(tmp_path / "a"), model=other)
    assert torch.equal(other.one.weight, one.one.weight)
    assert torch.equal(other.two.weight, one.one.weight)
    assert other.one.weight is not other.two.weight
