"""Budgets under the rules of CUDA's allocator: what it reserves stays within them, from step 1 on."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from tests.accelerator.programs import contrast
from tests.accelerator.simulated import caching, load
from tests.accelerator.test_uncut import head
from tests.zoo import Made, encoder, recurrence


def sequences(dropout: float = 0.0) -> nn.Module:
    """A transformer over tokens of any length."""
    return encoder(128, 200, layers=4, dropout=dropout, words=200)


def gru() -> nn.Module:
    """A GRU of plain operations: the device has no kernel for its cell."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 192)
        for one in x.unbind(1):
            reset, keep = self.gates(torch.cat([one, h], 1)).sigmoid().chunk(2, 1)
            h = keep * h + (1 - keep) * self.new(torch.cat([one, reset * h], 1)).tanh()
        return self.head(h)

    return Made(forward, gates=nn.Linear(256, 384), new=nn.Linear(256, 192), head=nn.Linear(192, 10))


def mixed(layer: nn.Module, width: int) -> nn.Module:
    """A residual block: a layer, GroupNorm, GELU."""
    body = nn.Sequential(layer, nn.GroupNorm(4, width), nn.GELU())
    return Made(lambda self, x: x + self.body(x), body=body)


def nested(width: int, levels: int, channels: int = 3) -> nn.Module:
    """A U-Net of so many levels."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.down(x)
        y = self.inside(nn.functional.max_pool2d(x, 2))
        return self.up(torch.cat([x, nn.functional.interpolate(y, scale_factor=2.0)], 1))

    return Made(
        forward, down=nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), block(width)),
        inside=nested(2 * width, levels - 1, width) if levels else block(width),
        up=nn.Conv2d((3 if levels else 2) * width, width, 3, padding=1),
    )  # fmt: skip


def block(width: int) -> nn.Module:
    return mixed(nn.Conv2d(width, width, 3, padding=1), width)


def images(width: int, *blocks: nn.Module, patch: int = 2) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, patch, patch), *blocks, head(width))


def towers() -> nn.Module:
    """Two encoders, whose outputs stand side by side."""
    left, right = (
        nn.Sequential(*[nn.Sequential(nn.Linear(w, 512), nn.Tanh()) for w in (64, 512, 512)])
        for _ in range(2)
    )
    return Made(
        lambda self, x: torch.cat([self.left(x).mean(1), self.right(x.flip(1)).mean(1)], 1),
        left=left, right=right,
    )  # fmt: skip


def wave() -> nn.Module:
    layers = [mixed(nn.Conv1d(32, 32, 3, padding=2**i, dilation=2**i), 32) for i in range(8)]
    last = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 4))
    return nn.Sequential(nn.Conv1d(1, 32, 1), *layers, *last)


def depthwise() -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Conv2d(32, 32, 7, 1, 3, groups=32), mixed(nn.Conv2d(32, 32, 1), 32))

    return images(32, *[layer() for _ in range(6)])


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    rows: int
    shape: tuple[int, ...]
    lengths: tuple[int, ...] = ()  # of the tokens, step by step
    loss: Any = nn.CrossEntropyLoss()
    options: ab.Options = ab.Options()


LENGTHS = (96, 64, 128, 80, 112, 72)
CASES = {
    "transformer": Case(sequences, 24, (), (96,)),
    "changing lengths": Case(sequences, 24, (), LENGTHS),
    "recompute": Case(sequences, 64, (), LENGTHS, options=ab.Options(recompute="all")),
    "dropout": Case(lambda: sequences(0.1), 24, (), (96,)),
    "convolutions": Case(lambda: images(24, *[block(24) for _ in range(6)]), 96, (3, 64, 64)),
    "depthwise": Case(depthwise, 56, (3, 64, 64)),
    "wave": Case(wave, 20, (1, 4096)),
    "lstm": Case(lambda: recurrence(64, 10, width=192, layers=2), 384, (24, 64)),
    "gru": Case(gru, 1536, (24, 64)),
    "two towers": Case(towers, 128, (64, 64), loss=ab.WholeBatch(contrast)),
    "u-net": Case(lambda: nn.Sequential(nested(8, 2), head(8)), 96, (3, 64, 64)),
}


class Found(NamedTuple):
    """Some steps: the most bytes reserved in each, the micro-batches of each, and how many were undone."""

    reserved: list[int]
    parts: list[int]
    undone: list[int]


def trained(name: str, memory: int | None, steps: int = 6) -> Found:
    case, native, found = CASES[name], load().native, Found([], [], [])
    gc.collect()
    native.empty_cache()
    floor = native.reserved()
    torch.manual_seed(0)
    model = case.build().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = ab.Step(model, case.loss, optimizer, memory=memory, options=case.options)
    for number in range(steps):
        length = case.lengths[number % len(case.lengths)] if case.lengths else 0
        x = torch.randint(200, (case.rows, length)) if length else torch.randn(case.rows, *case.shape)
        batch = x.to("sim"), torch.randint(4, (case.rows,)).to("sim")
        native.most_reserved()
        report = step(batch)
        del batch
        found.reserved.append(native.most_reserved() - floor)
        found.parts.append(report.micro_batches)
        found.undone.append(report.redone)
    return found


def exceeded(name: str, budget: int) -> list[str]:
    """Return what is wrong with steps within a budget."""
    found = trained(name, budget)
    wrong = [f"step {i}: {one} of {budget}" for i, one in enumerate(found.reserved, 1) if one > budget]
    return wrong + ([f"micro-batches undone: {found.undone}"] if any(found.undone) else [])


def kept(name: str, share: float) -> list[str]:
    """Return what is wrong with steps within a share of what the plain step reserves."""
    with caching():
        budget = int(share * max(trained(name, None, 3).reserved))
        try:
            return exceeded(name, budget)
        except ab.BudgetError as refused:
            return boundary(name, refused.smallest)


def boundary(name: str, smallest: int) -> list[str]:
    """Return what is wrong with a smallest budget: it holds, and 0.9 of it is refused."""
    wrong = exceeded(name, smallest)
    try:
        trained(name, int(0.9 * smallest), 1)
    except ab.BudgetError:
        return wrong
    return [*wrong, f"0.9 of {smallest} is not refused"]


FAST = [("changing lengths", 0.3), ("lstm", 0.45), ("transformer", 0.05)]
ROOMY = ("recompute", "dropout", "convolutions", "depthwise", "wave", "gru", "two towers", "u-net")
SLOW = [pytest.param(name, 0.3, marks=pytest.mark.slow) for name in ROOMY]


@pytest.mark.parametrize(("name", "share"), [*FAST, *SLOW])
def test_what_the_allocator_reserves_stays_within_the_budget(sim: Any, name: str, share: float) -> None:
    assert sim(kept, name, share) == []
