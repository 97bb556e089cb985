"""Tests of the meter: every count is exact, every byte has its owner, and nothing is left behind."""

from contextlib import nullcontext

import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from anybatch import Step
from anybatch.memory.ledger import OWNERS
from anybatch.memory.meter import Meter

NOTHING = nn.Identity()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@given(st.lists(st.tuples(st.sampled_from(["new", "view", "drop"]), st.integers(0, 9)), max_size=30))
def test_meter_agrees_with_a_list(moves: list[tuple[str, int]]) -> None:
    tensors: list[Tensor] = []
    storages: list[tuple[int, int]] = []  # (number, bytes) of the storage of each tensor
    peak = 0
    with Meter(NOTHING) as meter:
        for number, (move, index) in enumerate(moves):
            if move == "new":
                tensors.append(torch.zeros(index))
                storages.append((number, 4 * index))
            elif tensors:
                index %= len(tensors)
                if move == "view":
                    tensors.append(tensors[index].view(-1))
                    storages.append(storages[index])
                else:
                    del tensors[index], storages[index]
            live = sum(dict(storages).values())
            peak = max(peak, live)
            assert (meter.live, meter.peak) == (live, peak)
    assert meter.recording.peak() == peak


def owned(meter: Meter, phase: str) -> dict[str, int]:
    return dict(zip(OWNERS, meter.ledger().phases()[phase].bytes, strict=True))


def test_every_byte_has_its_owner() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, nn.CrossEntropyLoss(), optimizer)
    batch = torch.randn(16, 4), torch.randint(2, (16,))
    step(batch)
    with Meter(model, [optimizer], batch_leaves=batch) as meter:
        step(batch)
    size = sum(p.nbytes for p in model.parameters())
    start, backward, update = (owned(meter, phase) for phase in ("start", "backward", "update"))
    assert start["parameters"] == update["parameters"] == size
    assert start["optimizer state"] == 2 * size + 4 * len(list(model.parameters()))
    assert start["input"] == sum(leaf.nbytes for leaf in batch)
    assert start["gradients"] == start["activations"] == 0
    assert update["gradients"] == size
    assert backward["activations"] >= 16 * 8 * 4  # what Tanh keeps
    assert backward["workspace"] > 0
    assert meter.ledger().peak == meter.peak


def test_a_step_is_bit_identical_under_the_meter() -> None:
    batch, found = (torch.randn(6, 4), torch.randint(2, (6,))), []
    for watched in (False, True):
        torch.manual_seed(1)
        model = mlp()
        step = Step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), micro_batch=4)
        with Meter(model, step.optimizers, batch_leaves=batch) if watched else nullcontext():
            step(batch)
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))
