"""Ordinary programs that a comparison must neither refuse, warn of nor change."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import LossError


def batch(rows: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randint(3, (rows,))


def step(model: nn.Module, loss: Any, **options: Any) -> ab.Step:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batch=4, **options)


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
def test_dropout_in_a_block_that_runs_again_hides_no_loss_whose_rows_meet(policy: str) -> None:
    def meets(model: nn.Module, rows: Any) -> ab.Total:
        out = model(rows[0])
        return ab.Total(F.cross_entropy(out - out.mean(0), rows[1], reduction="sum"), len(out))

    def build(loss: Any) -> ab.Step:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(8, 3))
        return step(model, loss, options=ab.Options(recompute={"0": policy}))

    sound = build(nn.CrossEntropyLoss())
    assert all(sound(batch()).checked for _ in range(4))
    with pytest.raises(LossError):
        build(meets)(batch())


@pytest.mark.parametrize("check", [True, "always"])
def test_large_values_that_cancel_in_the_mean_are_rounding(check: Any) -> None:
    def surrogate(model: nn.Module, rows: Any) -> Tensor:
        chosen = model(rows[0]).log_softmax(-1).gather(1, rows[1][:, None])
        return -((chosen - chosen.detach()).exp()[:, 0] * rows[2]).mean()

    for seed in range(10):
        torch.manual_seed(seed)
        returns = 1000 * torch.randn(64)
        made = step(nn.Linear(8, 3), ab.ModelLoss(call=surrogate), options=ab.Options(check=check))
        assert made((*batch(64), returns - returns.mean())).compared == 1
