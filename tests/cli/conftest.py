"""A module of targets, which lies where the command is run."""

import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import torch
from torch import nn
from tests.budgets import net as counted

def rows(count=20):
    x = torch.arange(3.0 * count).view(count, 3).sin()
    return x, x.sum(1, keepdim=True)

def collate(many):
    x = torch.stack([torch.tensor(one) for one in many])
    return x, x.sum(1, keepdim=True)

def make():
    return nn.Linear(3, 1), nn.MSELoss(), rows()

def own_optimizer():
    model, *others = make()
    return model, *others, torch.optim.Adam(model.parameters(), lr=0.02)

def net():
    return counted(), nn.CrossEntropyLoss(), (torch.zeros(2, 5, 8), torch.zeros(2, dtype=torch.long))

def on_meta():
    with torch.device("meta"):
        return net()

def talking():
    print("I print what I like")
    return make()

def endless():
    raise KeyboardInterrupt

held_out = lambda: (*make(), rows(6))
samples = lambda: (*make()[:2], rows()[0].tolist(), collate)
loader = lambda: (*make()[:2], torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows()), 5))
wide = lambda: (nn.Sequential(nn.Linear(3, 300), nn.Linear(300, 300), nn.Linear(300, 1)), *make()[1:])
meeting = lambda: (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), nn.MSELoss(), rows(9))
with_two = lambda: (*own_optimizer(), own_optimizer()[3])
failing = lambda: (nn.Linear(2, 1), *make()[1:])
without_parameters = lambda: (nn.Tanh(), *make()[1:])
without_rows = lambda: (*make()[:2], 3)
pair = lambda: make()[:2]
wrong = lambda: make()[1:]
broken = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Any) -> str:
    name = f"target_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_late.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name
