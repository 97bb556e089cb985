"""Blocks that run again in 16 bits take what they took: values that 8 bits do not tell apart."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Precision, Step
from anybatch.recompute.blocks import POLICIES
from tests.options import flat
from tests.snapshots import changes
from tests.zoo import Made

YEARS = torch.tensor([[2011.0, 17.3, 1.0], [2016.0, 1029.7, 0.1], [2017.0, 1030.1, 0.7], [2024.0, 3.0, 0.2]])
YEARS = YEARS.bfloat16().float()  # inputs are rounded at the door


def after_steps(kind: bool | None = None, **options: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
        return x

    torch.manual_seed(0)
    kept = nn.Sequential(Made(lambda self, x: (x - 2016.5).tanh()), nn.Linear(3, 3))
    block = nn.Sequential(kept, nn.Linear(3, 3), nn.Tanh())
    model = Made(forward, blocks=nn.ModuleList([block, copy.deepcopy(block)]))
    precision = Precision(store="bfloat16", keep_float32=("blocks.*.0",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, nn.MSELoss(), optimizer, precision=precision, micro_batch=2, **flat(options))
    for _ in range(4):
        step((YEARS, torch.ones(4, 3)))
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "options",
    [{"kind": False}, *({"recompute": {"blocks.?": policy}} for policy in POLICIES)],
    ids=["torch's checkpoint", *POLICIES],
)
def test_blocks_that_run_again_take_what_they_took(options: dict[str, Any]) -> None:
    assert changes(after_steps(), after_steps(**options)) == []
