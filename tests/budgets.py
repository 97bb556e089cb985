"""Tiny models for planning, what is measured around a real step, and what planning must leave as it is."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import Step
from anybatch.core import BudgetError
from anybatch.core.batch import TensorBatch
from anybatch.engine import Plan, admit, carry_out
from anybatch.memory.meter import Meter
from anybatch.planner.request import Request
from anybatch.recompute.blocks import find_blocks
from tests.options import flat
from tests.snapshots import changes, same_as_before, snapshot

WIDTH, CLASSES, ROWS = 8, 4, 24

Build = Callable[..., Optimizer]


class Block(nn.Module):
    """What is worth rebuilding: little comes in, much is kept."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.narrow(torch.tanh(self.wide(x).sin())))


class Net(nn.Module):
    """Three blocks along the last axis, and a buffer that every forward changes."""

    def __init__(self, dropout: float = 0.0, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1) if x.dim() == 3 else x)


class Normed(nn.Module):
    """A block in which rows meet, and whose kernels hold nothing beside tensors if its layer is linear."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.layer(x).sin()).tanh()


class Meeting(nn.Module):
    """Blocks with BatchNorm for rows of 8 x 64 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Normed(nn.Linear(16, 16), 8) for _ in range(4)])
        self.head, self.places = nn.Linear(16, CLASSES), (1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(self.places))


class ConvNet(Meeting):
    """The same with convolutions, for images."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Normed(nn.Conv2d(4, 4, 3, padding=1), 4) for _ in range(4)])
        self.head, self.places = nn.Linear(4, CLASSES), (2, 3)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters)


def foreach(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def make(
    model: Callable[[], nn.Module] = Net,
    optimizer: Build = adamw,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Step:
    """A step on a model that is the same each time."""
    torch.manual_seed(0)
    built = model().to(dtype)
    return Step(
        built, nn.CrossEntropyLoss(), optimizer(built.parameters()), **flat({"check": False} | options)
    )


def rows_of(rows: int = ROWS, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A batch of vectors, or of rows of this shape."""
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, *(shape or (WIDTH,)), generator=draw, dtype=dtype)
    return x, torch.randint(CLASSES, (rows,), generator=draw)


def images(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rows_of(rows, 4, 6, 6, dtype=dtype)


def request(step: Step, batch: Any, rows: int | None = None, **options: Any) -> Request:
    """What planning would ask, with nothing settled."""
    task = step.task()
    logical = admit(batch, task, step.collate)
    rows = logical.rows if rows is None else rows
    like = Plan(rows=rows, micro_batch=rows)
    blocks = find_blocks(step.model)
    return Request(**{"task": task, "batch": logical, "like": like, "blocks": blocks} | options)


def measured(step: Step, batch: Any) -> int:
    """The peak of a real step; of the second one, when the optimizers hold their state."""
    step(batch)
    return metered(step, lambda: step(batch), batch)


def metered(step: Step, run: Callable[[], object], batch: Any) -> int:
    """The peak while something runs."""
    leaves: Sequence[Tensor] = () if step.collate else TensorBatch(batch).leaves
    with Meter(step.model, step.optimizers, loss_module=step.loss_module, batch_leaves=leaves) as meter:
        run()
    return meter.peak


def carried_out(step: Step, plan: Plan, batch: Any) -> None:
    """A plan, obeyed without any planning."""
    task = step.task()
    task.effects.begin(task.network.modules)  # as a step does
    carry_out(plan, task, admit(batch, task, step.collate))


def changed_by(step: Step, run: Callable[[], object]) -> list[str]:
    """What is not as before, of all that a step may touch."""
    before = copy.deepcopy(snapshot(step))
    run()
    return changes(before, snapshot(step))


def refused(step: Any, batch: Any, match: str = "By readings the smallest budget") -> int:
    """The smallest budget that is named where a batch is refused, which changes nothing."""
    with same_as_before(step), pytest.raises(BudgetError, match=match) as caught:
        step(batch)
    return caught.value.smallest
