"""Training with a compiled model: checkpoints for either model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.train import checkpoint
from tests.compiled import Counting


def make(counting: Counting | None = None) -> ab.Trainer:
    torch.manual_seed(0)
    x, y = torch.randn(43, 4), torch.randint(3, (43,))  # batches of 20, 20 and 3
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3))
    model = model if counting is None else counting.compile(model)
    optimizer, flow = torch.optim.AdamW(model.parameters(), lr=0.01), ab.GradientFlow(model)
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=16, callbacks=[flow])
    return ab.Trainer(step, (x, y), batch_size=20, progress=False, callbacks=[ab.EMA(0.9)])


def weights(trainer: ab.Trainer) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): one for name, one in trainer.step.model.state_dict().items()}


@pytest.mark.parametrize("is_compiled", [True, False])
def test_either_model_goes_on_from_the_others_checkpoint(is_compiled: bool, tmp_path: Path) -> None:
    first, second = (make(Counting() if is_compiled == is_first else None) for is_first in (True, False))
    first.fit(epochs=1)
    first.save(tmp_path / "a")
    second.resume(tmp_path / "a")
    saved = weights(first)
    assert all(torch.equal(weights(second)[name], value) for name, value in saved.items())
    ema: Any = second.callbacks[-1]
    assert ema.average.keys() == saved.keys()
    second.fit(epochs=2)
    found = checkpoint.load(tmp_path / "a").model
    assert set(found) == set(saved)
    make().step.model.load_state_dict(found)
