"""The contestants: one update, the same cut: a hand-written loop, anybatch, accelerate, Lightning Fabric."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import anybatch as ab
from benchmarks.config import RaceCase
from benchmarks.tasks import IGNORE, Batch, Task, split

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
    window: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of `ab.Step`

    @classmethod
    def of(cls, case: RaceCase, task: Task, model: nn.Module, optimizer: Optimizer) -> "Entry":
        """With the cut and the options of a case."""
        return cls(
            task=task,
            model=model,
            optimizer=optimizer,
            rows=case.rows,
            micro_batches=case.micro_batches,
            window=case.window,
            options=case.options,
        )


def hand(entry: Entry) -> Update:
    """The honest loop: count the valid labels of the whole batch first, sum, divide, add up."""
    model, optimizer, criterion, rows = entry.model, entry.optimizer, entry.task.criterion, entry.rows
    if criterion is None:
        return _hand_with_own_loss(entry)
    clip_norm, is_mixed = entry.options.get("clip_norm"), entry.options.get("precision") == "bf16-mixed"

    def update(batch: Batch) -> float:
        inputs, target = batch
        weight = (target != IGNORE).sum()
        running = torch.zeros(())
        for x, y in zip(inputs.split(rows), target.split(rows), strict=True):
            if is_mixed:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = criterion(model(x), y, reduction="sum") / weight
            else:
                loss = criterion(model(x), y, reduction="sum") / weight
            loss.backward()
            running += loss.detach()
        if clip_norm is not None:
            clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return running.item()

    return update


def _hand_with_own_loss(entry: Entry) -> Update:
    """Around a model that returns the mean over the valid labels of a micro-batch."""
    model, optimizer, rows = entry.model, entry.optimizer, entry.rows

    def update(batch: Batch) -> float:
        weight = (batch["labels"] != IGNORE).sum()
        running = torch.zeros(())
        for micro in split(batch, rows):
            loss = model(**micro).loss * (micro["labels"] != IGNORE).sum() / weight
            loss.backward()
            running += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return running.item()

    return update


def anybatch(entry: Entry) -> Update:
    """What the README shows."""
    rows = None if entry.window else entry.rows
    step = ab.Step(entry.model, entry.task.loss, entry.optimizer, micro_batch=rows, **entry.options)
    if not entry.window:
        return lambda batch: step(batch).loss

    def update(batch: Batch) -> float:
        window = step.window()
        for micro in split(batch, entry.rows):
            window.add(micro)
        return window.close().loss

    return update


def accelerate(entry: Entry) -> Update:
    """The documented loop of accelerate: `accumulate`, `backward`; it divides each mean by their number."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=entry.micro_batches, cpu=True)
    model, optimizer = accelerator.prepare(entry.model, entry.optimizer)
    mean, rows, count = entry.task.mean, entry.rows, entry.micro_batches

    def update(batch: Batch) -> float:
        running = torch.zeros(())
        for micro in split(batch, rows):
            with accelerator.accumulate(model):
                loss = mean(model, micro)
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
    mean, rows, count = entry.task.mean, entry.rows, entry.micro_batches

    def update(batch: Batch) -> float:
        running = torch.zeros(())
        for index, micro in enumerate(split(batch, rows), start=1):
            with lightning.no_backward_sync(model, enabled=index < count):
                loss = mean(model, micro) / count
                lightning.backward(loss)
            running += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return running.item()

    return update


Builders = Mapping[str, Callable[[Entry], Update]]
"""Contestants by name."""

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
