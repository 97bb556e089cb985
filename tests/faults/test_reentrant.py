"""Reentrant checkpoints of the caller's own, and a micro-batch that has to come again."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Step
from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import take
from tests.options import flat
from tests.zoo import Made


def make(*, is_tied: bool = False, **options: Any) -> Step:
    """Trained layers, or one thrice, that are only reached through checkpoints, as adapters are."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # in backward
            fault.replays += 1
            if fault.replays - 1 == fault.at:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.tanh(layer(x))

    def forward(self: Any, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(1).requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(run, layer, hidden, use_reentrant=True)
        return self.head(hidden)

    torch.manual_seed(0)
    fault = SimpleNamespace(replays=0, at=-1)  # no snapshot of modules puts it back
    table, layers = nn.Embedding(20, 8).requires_grad_(False), [nn.Linear(8, 8) for _ in range(3)]
    layers = nn.ModuleList(layers[:1] * 3 if is_tied else layers)
    model = Made(forward, table=table, layers=layers, head=nn.Linear(8, 4), fault=fault)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=4, **flat(options))


# Of each micro-batch a replay, and each layer's.
PLACES = [("step", at) for at in (0, 1, 2, 4, 6, 11)] + [("window", 5)]


@pytest.mark.parametrize("options", [{}, {"accumulate": torch.float64}, {"non_finite": "skip"}], ids=str)
@pytest.mark.parametrize("is_tied", [False, True], ids=["three", "tied"])
@pytest.mark.parametrize(("way", "at"), PLACES)
def test_out_of_memory_in_a_replay_loses_nothing(way: str, at: int, is_tied: bool, options: Any) -> None:
    step, twin = (make(is_tied=is_tied, **options) for _ in range(2))
    step.model.fault.at, batch = at, (torch.randint(20, (16, 5)), torch.randint(4, (16,)))
    assert [take(one, way, batch).redone for one in (step, twin)] == [1, 0]
    found, expected = ([*one.model.parameters()] for one in (step, twin))
    assert relative_error(found, expected) <= tolerance(torch.float32, 4)


@pytest.mark.parametrize("is_tied", [False, True], ids=["three", "tied"])
def test_an_overflow_loses_nothing_where_gradients_are_looked_at_in_parts(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anybatch.engine.gradients.BUCKET", 64)  # bytes, less than any layer has
    step, twin = (make(is_tied=is_tied, precision="fp16-mixed") for _ in range(2))
    first, batch = [math.inf], (torch.randint(20, (16, 5)), torch.randint(4, (16,)))
    step.model.layers[0].weight.register_hook(lambda gradient: gradient * (first.pop() if first else 1.0))
    twin.scale.give_way()
    assert [one(batch).redone for one in (step, twin)] == [1, 0]
    assert relative_error([*step.model.parameters()], [*twin.model.parameters()]) <= tolerance(
        torch.float32, 4
    )
