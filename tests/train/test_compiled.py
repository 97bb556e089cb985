"""Training with a compiled model: one compilation more for validation, and checkpoints for either model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.train import checkpoint
from tests.compiled import Counting

ROWS = 43  # batches of 20, 20 and 3; validation of 16 and 9


def make(counting: Counting | None = None, *, dropout: float = 0.0, **options: Any) -> ab.Trainer:
    torch.manual_seed(0)
    rows = torch.randn(ROWS, 4), torch.randint(3, (ROWS,))
    block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout))
    model = nn.Sequential(block, nn.Linear(8, 3))
    if counting is not None:
        model = counting.compile(model)
    step = ab.Step(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        micro_batch=None if dropout else 16,
        callbacks=[ab.GradientFlow(model)],
    )
    validation = rows[0][:25], rows[1][:25]
    options["callbacks"] = [ab.Metrics(accuracy=ab.accuracy), *options.get("callbacks", [])]
    return ab.Trainer(step, rows, validation, batch_size=20, progress=False, **options)


def weights(trainer: ab.Trainer) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): one for name, one in trainer.step.model.state_dict().items()}


@pytest.mark.parametrize("is_compiled", [True, False])
def test_either_model_goes_on_from_the_others_checkpoint(is_compiled: bool, tmp_path: Path) -> None:
    def one(is_first: bool) -> ab.Trainer:
        counting = Counting() if is_compiled == is_first else None
        return make(counting, callbacks=[ab.EMA(0.9)])

    first = one(True)
    first.fit(epochs=1)
    first.save(tmp_path / "a")
    second = one(False)
    second.resume(tmp_path / "a")
    for name, value in weights(first).items():
        assert torch.equal(weights(second)[name], value)
    ema = second.callbacks[-1]
    assert isinstance(ema, ab.EMA)
    assert ema.average.keys() == weights(first).keys()
    second.fit(epochs=2)
    assert set(checkpoint.load(tmp_path / "a").model) == set(weights(first))
    copy.deepcopy(make().step.model).load_state_dict(checkpoint.load(tmp_path / "a").model)
