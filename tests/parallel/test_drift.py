"""Ranks stay alike: drifts are noticed, process groups used, and what else a wrapper was told refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.errors import PlanError
from anybatch.parallel.fingerprint import TURNS
from tests.faults.faulty import make_batch
from tests.parallel.pairs import Pair
from tests.parallel.spawned import on_ranks
from tests.zoo import Made

AT = 3  # the step before which rank 1 drifts


def shifted() -> Any:
    """A model with a buffer that forwards read."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    return Made(lambda self, x: self.body(x - self.mean), mean=torch.zeros(9), body=body)


def load(model: Any, optimizer: Any, loss: Any) -> None:
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] / 2
    optimizer.load_state_dict(state)


#: what a rank does, and after how many steps at most the others notice
DRIFTS: dict[str, tuple[Callable[..., object], int]] = {
    "weights": (lambda model, *_: nn.init.ones_(model.body[0].bias), 0),
    "optimizer state": (load, 0),
    "optimizer": (lambda model, optimizer, loss: optimizer.param_groups[0].update(lr=0.02), 0),
    "loss": (lambda model, optimizer, loss: loss.weight.mul_(3), 0),
    "weights by data": (lambda model, *_: model.body[2].weight.data[0, 0].add_(1e-12), TURNS),
    "optimizer state in place": (lambda m, o, _: o.state[m.body[2].weight]["exp_avg_sq"].mul_(1.1), TURNS),
    "buffers": (lambda model, *_: model.mean.add_(1), TURNS),
    "": (lambda *_: None, -1),  # none is noticed where none is
}


@pytest.mark.parametrize("at", [0, AT])
@pytest.mark.parametrize("name", DRIFTS)
@on_ranks(2)
def test_a_drift_is_noticed_on_all_ranks_before_the_update(rank: int, size: int, name: str, at: int) -> Any:
    """At once in the first step, which is compared in full."""
    drift, most = DRIFTS[name]
    model, loss = shifted(), nn.CrossEntropyLoss(weight=torch.ones(4).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = ab.Step(model, loss, optimizer, micro_batch=2, options=ab.Options(check=False))
    is_there = at or "state" not in name  # the optimizer has none at first
    for index in range(at + TURNS + 1):
        if index == at and rank == 1 and is_there:
            drift(model, optimizer, loss)
        try:
            step(make_batch(100 * index + rank, 5, torch.float64))
        except PlanError as error:
            said = str(error)
            assert index - at <= (most if at else 0)
            assert name.split(" by ")[0].split(" in ")[0] in said or "weights" in said
            assert "No update was made" in said
            return index, said
    assert not name or not is_there
    return None


@on_ranks(2)
def test_the_same_rows_on_all_ranks_are_warned_of(rank: int, size: int) -> None:
    step = Pair(shifted(), "torch", "sgd", check=False).step
    with pytest.warns(UserWarning, match="made of copies"):
        assert [step(make_batch(index, 5, torch.float64)).updated for index in range(4)]
