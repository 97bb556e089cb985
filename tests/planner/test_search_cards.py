"""Plans for a card that is not here, where moving and the update's bytes decide."""

from typing import Any

import torch
from torch import Tensor, nn

from anybatch.memory.device import find_device
from anybatch.planner.candidates import Request
from anybatch.planner.search import choose
from anybatch.recompute import offload
from tests.budgets import make, request


class Block(nn.Module):
    """What it keeps is large, and cheap to rebuild."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 256)
        self.norms = nn.ModuleList([nn.LayerNorm(256) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x)
        for norm in self.norms:
            y = torch.tanh(norm(y))
        return x + y


def blocks(rows: int, share: float, **options: Any) -> Request:
    """About a budget of so many times the bytes of the parameters."""
    step = make(lambda: nn.Sequential(nn.Sequential(*[Block() for _ in range(8)]), nn.Linear(256, 4)))
    budget = int(share * sum(p.nbytes for p in step.model.parameters()))
    batch = torch.randn(rows, 256), torch.randint(4, (rows,))
    return request(step, batch, budget=budget, device=find_device("cuda:rtx3060"), **options)


def test_an_update_that_goes_one_by_one_leaves_blocks_to_be_rebuilt() -> None:
    """The update all at once is over the budget; whether rebuilding helps is asked of the other one."""
    plan = choose(blocks(32, 4.3, parts=2)).plan
    assert (plan.micro_batch, plan.foreach) == (16, False)
    assert plan.blocks


def test_a_whole_batch_that_is_too_large_after_all_is_rebuilt() -> None:
    """What its composition is off by counts for what is composed of it."""
    slower = [choose(blocks(64, share)).seconds for share in (4.8, 5.0)]
    assert slower[1] <= slower[0]


def test_what_a_kept_block_lets_go_in_a_forward_is_there_at_every_size() -> None:
    """Its bytes cross the size from which on things are moved; nothing is moved on the host."""

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(torch.sigmoid(x)))

    inner = [
        nn.Linear(64, 64),
        nn.Sequential(*[Keeper() for _ in range(6)]),
        nn.Flatten(),
        nn.Linear(5120, 4),
    ]
    step = make(lambda: nn.Sequential(*inner))
    batch = torch.randn(16, 80, 64), torch.randint(4, (16,))
    assert offload.SMALLEST in range(2 * 80 * 64 * 4, 5 * 80 * 64 * 4)
    for share in (0.6, 0.5):
        budget = int(share * choose(request(step, batch)).peak)
        assert choose(request(step, batch, budget=budget)).peak <= budget
