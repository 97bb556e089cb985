"""The contestants: one update, the same cut: a hand-written loop, anybatch, accelerate, Lightning Fabric."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn
from torch.optim import Optimizer

import anybatch as ab
from benchmarks.tasks import IGNORE, Batch, Task

Update = Callable[[Batch], float]
"""One optimizer step on a whole logical batch; returns its loss as a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a contestant is given: the task, its own copy of the model, an optimizer, and the cut."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    rows: int  # of one micro-batch
    micro_batches: int


def hand(entry: Entry) -> Update:
    """The honest loop: count the valid labels of the whole batch first, sum, divide, add up."""
    model, optimizer, criterion, rows = entry.model, entry.optimizer, entry.task.criterion, entry.rows

    def update(batch: Batch) -> float:
        inputs, target = batch
        weight = (target != IGNORE).sum()
        running = torch.zeros(())
        for x, y in zip(inputs.split(rows), target.split(rows), strict=True):
            loss = criterion(model(x), y, reduction="sum") / weight
            loss.backward()
            running += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return running.item()

    return update


def anybatch(entry: Entry) -> Update:
    """What the README shows."""
    step = ab.Step(entry.model, entry.task.loss, entry.optimizer, micro_batch=entry.rows)
    return lambda batch: step(batch).loss


def accelerate(entry: Entry) -> Update:
    """The documented loop of accelerate: `accumulate`, `backward`; it divides each mean by their number."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=entry.micro_batches, cpu=True)
    model, optimizer = accelerator.prepare(entry.model, entry.optimizer)
    criterion, rows, count = entry.task.criterion, entry.rows, entry.micro_batches

    def update(batch: Batch) -> float:
        running = torch.zeros(())
        for x, y in zip(batch[0].split(rows), batch[1].split(rows), strict=True):
            with accelerator.accumulate(model):
                loss = criterion(model(x), y, reduction="mean")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            running += loss.detach() / count
        return running.item()

    return update


def fabric(entry: Entry) -> Update:
    """The documented loop of Lightning Fabric: `no_backward_sync` on all but the last micro-batch."""
    from lightning_fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    model, optimizer = lightning.setup(entry.model, entry.optimizer)
    criterion, rows, count = entry.task.criterion, entry.rows, entry.micro_batches

    def update(batch: Batch) -> float:
        running = torch.zeros(())
        cut = zip(batch[0].split(rows), batch[1].split(rows), strict=True)
        for index, (x, y) in enumerate(cut, start=1):
            with lightning.no_backward_sync(model, enabled=index < count):
                loss = criterion(model(x), y, reduction="mean") / count
                lightning.backward(loss)
            running += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return running.item()

    return update


RIVALS: dict[str, Callable[[Entry], Update]] = {"hand": hand, "anybatch": anybatch}
PEERS: dict[str, Callable[[Entry], Update]] = {"accelerate": accelerate, "fabric": fabric}
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning-fabric"}


def installed() -> dict[str, Callable[[Entry], Update]]:
    """The hand-written loop, anybatch, and those peers whose package is there."""
    present = dict(RIVALS)
    for name, build in PEERS.items():
        try:
            version(PACKAGES[name])
        except PackageNotFoundError:
            print(f"{name}: not installed, left out (pip install {PACKAGES[name]} to see it in the report)")
        else:
            present[name] = build
    return present
