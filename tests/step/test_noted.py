"""What a window noted as it began: as plain values that a checkpoint holds, and as they were again."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.step.noted import plain, plain_state, state_of, tensor
from anybatch.train import checkpoint
from tests.snapshots import same


class Drawing(nn.Module):
    """Draws from generators of its own, counts in buffers, and puts another tensor in the place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(1)
        self.numpys = [np.random.default_rng(1)][0]
        self.legacy = np.random.RandomState(1)
        self.philox = np.random.Generator(np.random.Philox(1))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = x.detach().mean(0)
        self.first = torch.full((4,), float(self.count))
        self.register_buffer("late", torch.ones(1))
        return x * self.weight * sum(self.draws())

    def draws(self) -> list[float]:
        return [
            float(torch.rand((), generator=self.torchs)),
            self.pythons.random(),
            float(self.numpys.random()),
            float(self.legacy.rand()),
            float(self.philox.random()),
            random.random(),
            float(np.random.rand()),
            float(torch.rand(())),
        ]


def build() -> Step:
    model = Drawing()
    return Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_streams_and_buffers_are_as_they_were_when_the_window_began(tmp_path: Path) -> None:
    step, other = build(), build()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    window = step.window()
    window.add(batch)
    window.add(batch)
    checkpoint.save(tmp_path / "a", model=nn.Identity(), progress={"window": window.state()})
    window.discard()
    expected = step.model.draws(), dict(step.model.named_buffers()), list(step.model._buffers)

    other.model.draws()  # stands elsewhere
    other.model(batch[0])
    with torch.no_grad():
        other.model.count += 7
    again = other.window(checkpoint.load(tmp_path / "a").progress["window"])
    again.add(batch)
    again.discard()
    found = other.model.draws(), dict(other.model.named_buffers()), list(other.model._buffers)
    assert same(found, expected)
    assert found[1]["first"].shape == (2,)
    assert "late" not in found[2]


def test_buffers_that_have_not_changed_take_no_room() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), batch_norm="micro")
    window = step.window()
    window.add((torch.randn(4, 3), torch.randn(4, 3)))
    tables = window.state()["before"]["tables"]
    assert list(tables) == [1]  # the first norm; 0 is the model itself
    assert tables[1]["running_mean"].tolist() == [0.0, 0.0, 0.0]


def test_weights_that_a_forward_writes_to_are_as_they_were() -> None:
    def make() -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 4))
        return Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))

    step, other = make(), make()
    before = step.model[0].weight.detach().clone()
    window = step.window()
    window.add((torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1])))
    assert not torch.equal(step.model[0].weight, before)
    other.model.load_state_dict(step.model.state_dict())
    again = other.window(window.state())
    again.add((torch.tensor([[4, 1]]), torch.tensor([0])))
    again.discard()
    assert torch.equal(other.model[0].weight, before)


@pytest.mark.parametrize(
    "state",
    [
        random.Random(2).getstate(),
        np.random.RandomState(2).get_state(legacy=False),
        np.random.default_rng(2).bit_generator.state,
        np.random.Philox(2).state,
        b"\x00\xff",
        torch.arange(3),
    ],
)
def test_states_of_streams_come_back(state: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=nn.Identity(), progress={"state": plain_state(state)})
    found = state_of(checkpoint.load(tmp_path / "a").progress["state"])
    assert repr(found) == repr(state)
    assert type(found) is type(state)


def test_a_sum_is_laid_out_as_its_parameter_and_of_its_dtype() -> None:
    parameter = nn.Parameter(torch.ones(2, 3).t())
    value = torch.arange(6.0).view(3, 2)
    found = tensor(plain(value), parameter, torch.float32)
    assert torch.equal(found, value)
    assert found.stride() == parameter.stride() != value.stride()
    with pytest.raises(ValueError, match=r"torch.float32 \(3, 2\) for torch.float64 \(3, 2\)"):
        tensor(plain(value), parameter, torch.float64)
    sparse = torch.eye(3, 2).to_sparse()
    again = tensor(plain(sparse), parameter, torch.float32)
    assert torch.equal(again.to_dense(), sparse.to_dense())
    assert again.is_coalesced() == sparse.is_coalesced()
