"""Loops of accelerate, as a user writes them, that keep what they saw."""

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

import anybatch as ab
from tests.homes.tasks import LOSSES, MICRO_BATCH, OURS, ROWS, UPDATES, Net, data


def accelerator(**options: Any) -> Accelerator:
    """A new one: accelerate keeps its state for the process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return Accelerator(cpu=True, **options)


class Loop:
    """A training; `losses` are the host's own without `is_ours`."""

    def __init__(
        self,
        task: str,
        host: Accelerator,
        *,
        is_ours: bool,
        most: int = ROWS,
        width: int = 16,
        **options: Any,
    ) -> None:
        self.host, self.plain = host, Net(width, most).double()
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        self.model, self.optimizer, self.scheduler = host.prepare(self.plain, optimizer, scheduler)
        self.loss: Callable[[Any], Tensor] = lambda batch: LOSSES[task](self.model, batch)
        if is_ours:
            self.loss = ab.BatchLoss(self.model, OURS[task], **{"micro_batch": MICRO_BATCH} | options)
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.rates: list[float] = []

    def run(self, batches: Any) -> "Loop":
        for batch in batches:
            with self.host.accumulate(self.model):
                loss = self.loss(batch)
                self.host.backward(loss)
                if self.host.sync_gradients:
                    named = self.plain.named_parameters()
                    self.gradients.append({name: p.grad.clone() for name, p in named})
                    self.rates.append(self.scheduler.get_last_lr()[0])
                    self.host.clip_grad_norm_(self.model.parameters(), 0.1)
                self.losses.append(loss.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.plain.parameters()]


def batches(task: str, rows: int = ROWS, count: int = UPDATES, **options: Any) -> list[list[Tensor]]:
    parts = [part.split(rows) for part in data(task, count, **options)]
    return [[*batch] for batch in zip(*parts, strict=True)]


def loop_on_rank(
    rank: int, size: int, task: str, is_ours: bool
) -> tuple[dict[str, Tensor], list[float], float]:
    """Train on every other batch; return the first gradient, the losses, and the parameters' sum."""
    before = {**os.environ}
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # not used: there is a group
    try:
        host = accelerator()
        assert host.num_processes == size
        loop = Loop(task, host, is_ours=is_ours).run(batches(task, count=6)[rank::size])
        return loop.gradients[0], loop.losses, sum(float(p.sum()) for p in loop.parameters)
    finally:
        os.environ.clear()
        os.environ.update(before)
