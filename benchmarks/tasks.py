"""What is trained: a model, its optimizer, its loss as each contestant wants it, and made-up batches."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import anybatch as ab
from benchmarks.models import CONTEXT, GPT, VOCABULARY, WORDS, LeNet5, bert_tiny, mlp, resnet18

IGNORE = -100  # the label of padding and of rows without a label: cross-entropy's own default

Batch = Any
"""Inputs and targets, or what a model with a loss of its own takes by name; rows first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with everything needed to train it.

    `loss` is what a user hands to anybatch; `criterion(logits, target, reduction=...)` is the same loss as
    the hand-written loop (sum) and the peers (mean) write it, None where the model computes its own mean.
    `batch(rows, generator, ragged)` makes random rows; the number of valid labels differs from row to row
    when `ragged`.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: object
    criterion: Callable[..., Tensor] | None
    batch: Callable[[int, torch.Generator, bool], Batch]

    def mean(self, model: nn.Module, batch: Batch) -> Tensor:
        """Torch's own mean, or the model's."""
        if self.criterion is None:
            return model(**batch).loss
        return self.criterion(model(batch[0]), batch[1], reduction="mean")


def leaves(batch: Batch) -> list[Tensor]:
    """The tensors of a batch."""
    return list(batch.values() if isinstance(batch, dict) else batch)


def split(batch: Batch, rows: int) -> Iterator[Batch]:
    """Micro-batches of `rows` rows."""
    parts = zip(*(leaf.split(rows) for leaf in leaves(batch)), strict=True)
    return (dict(zip(batch, part, strict=True)) for part in parts) if isinstance(batch, dict) else parts


def make_batch(
    task: Task, rows: int, *, seed: int, ragged: bool, dtype: torch.dtype = torch.float32
) -> Batch:
    """Random rows of `task`, the same for the same seed, with floating inputs in `dtype`."""
    batch = task.batch(rows, torch.Generator().manual_seed(seed), ragged)
    if isinstance(batch, dict):  # token ids
        return batch
    inputs, target = batch
    return (inputs.to(dtype) if inputs.is_floating_point() else inputs), target


def make_model(task: Task, *, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of `task`, the same for the same seed, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model().to(dtype)


def _token_loss(logits: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    # Flat logits: three times as fast on a CPU as cross-entropy over a transposed class axis.
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction=reduction)


def _token_total(model: nn.Module, micro: Batch) -> ab.Total:
    tokens, target = micro
    return ab.Total(_token_loss(model(tokens), target, reduction="sum"), (target != IGNORE).sum())


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[int, torch.Generator, bool], Batch]:
    def batch(rows: int, generator: torch.Generator, ragged: bool) -> Batch:
        inputs = torch.randn(rows, *shape, generator=generator)
        target = torch.randint(classes, (rows,), generator=generator)
        # Later rows lose their label more often: micro-batches then differ in weight.
        unlabelled = torch.rand(rows, generator=generator) < torch.linspace(0.0, 0.9, rows)
        return inputs, target.masked_fill(unlabelled, IGNORE) if ragged else target

    return batch


def _text(rows: int, generator: torch.Generator, ragged: bool) -> Batch:
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    lengths = torch.randint(1, CONTEXT + 1, (rows, 1), generator=generator)
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return inputs, target.masked_fill(torch.arange(CONTEXT) >= lengths, IGNORE) if ragged else target


def _sentences(rows: int, generator: torch.Generator, ragged: bool) -> Batch:
    labels = torch.randint(3, (rows,), generator=generator)
    # The model's own mean of no label at all would be NaN: only every second row may lose its label.
    unlabelled = (torch.rand(rows, generator=generator) < 0.7) & (torch.arange(rows) % 2 == 1)
    return {
        "input_ids": torch.randint(WORDS, (rows, 32), generator=generator),
        "attention_mask": (torch.arange(32) < torch.randint(8, 33, (rows, 1), generator=generator)).long(),
        "labels": labels.masked_fill(unlabelled, IGNORE) if ragged else labels,
    }


TASKS = {
    "lenet5": Task(
        model=LeNet5,
        optimizer=lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        criterion=F.cross_entropy,
        batch=_labelled((1, 32, 32), 10),
    ),
    "gpt": Task(
        model=GPT,
        optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
        loss=_token_total,
        criterion=_token_loss,
        batch=_text,
    ),
    "mlp": Task(
        model=mlp,
        optimizer=lambda parameters: SGD(parameters, lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        criterion=F.cross_entropy,
        batch=_labelled((16,), 4),
    ),
    "resnet": Task(
        model=resnet18,
        optimizer=lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        criterion=F.cross_entropy,
        batch=_labelled((3, 64, 64), 10),
    ),
    "bert": Task(
        model=bert_tiny,
        optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
        loss=ab.ModelLoss(),
        criterion=None,
        batch=_sentences,
    ),
}
