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
from tests import zoo
from tests.options import flat
from tests.snapshots import changes, same_as_before, snapshot

WIDTH, CLASSES, ROWS = 8, 4, 24


def net(dropout: float = 0.0, blocks: int = 3) -> nn.Module:
    """Return blocks along the last axis, and a buffer that every forward changes."""
    return zoo.counting(zoo.blocks(WIDTH, CLASSES, count=blocks, dropout=dropout))


def pooled(layer: Callable[[], nn.Module], channels: int, width: int, *places: int) -> nn.Module:
    """Return blocks in which rows meet; with a linear layer their kernels hold nothing beside tensors."""

    def block() -> nn.Module:
        forward = lambda self, x: x + self.norm(self.layer(x).sin()).tanh()  # noqa: E731
        return zoo.Made(forward, layer=layer(), norm=nn.BatchNorm2d(channels))

    forward = lambda self, x: self.head(self.blocks(x).mean(places))  # noqa: E731
    blocks = nn.Sequential(*[block() for _ in range(4)])
    return zoo.Made(forward, blocks=blocks, head=nn.Linear(width, CLASSES))


def meeting() -> nn.Module:
    """Return such blocks for rows of 8 x 64 x 16."""
    return pooled(lambda: nn.Linear(16, 16), 8, 16, 1, 2)


def conv_net() -> nn.Module:
    return pooled(lambda: nn.Conv2d(4, 4, 3, padding=1), 4, 4, 2, 3)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters)


def foreach(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def make(model: Any = net, optimizer: Any = adamw, *, dtype: Any = torch.float32, **options: Any) -> Step:
    """A step on a model that is the same each time."""
    torch.manual_seed(0)
    built = model().to(dtype)
    given = flat({"check": False} | options)
    return Step(built, nn.CrossEntropyLoss(), optimizer(built.parameters()), **given)


def rows_of(rows: int = ROWS, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A batch of vectors, or of rows of this shape."""
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, *(shape or (WIDTH,)), generator=draw, dtype=dtype)
    return x, torch.randint(CLASSES, (rows,), generator=draw)


def images(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rows_of(rows, 4, 6, 6, dtype=dtype)


def request(step: Step, batch: Any, **options: Any) -> Request:
    """What planning would ask, with nothing settled."""
    task, blocks = step.task(), find_blocks(step.model)
    logical = admit(batch, task, step.collate)
    like = Plan(rows=logical.rows, micro_batch=logical.rows)
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
