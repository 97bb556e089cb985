"""Ranks that were not made alike, and what else is refused. Called on every rank."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

import anybatch as ab
from tests.options import flat

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def make(
    *,
    width: int = 4,
    seed: int = 0,
    lr: float = 0.1,
    smoothing: float = 0.0,
    clip_norm: float | None = None,
    rows: Any = (X, Y),
) -> Callable[[], object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
    loss: Any = nn.CrossEntropyLoss(label_smoothing=smoothing)
    step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=lr), clip_norm=clip_norm)
    return lambda: step(rows)


DIFFERENT: dict[str, dict[str, Any]] = {
    "model": {"width": 5},
    "weights": {"seed": 1},
    "optimizer": {"lr": 0.2},
    "loss": {"smoothing": 0.1},
    "options": {"clip_norm": 1.0},
}


def different(rank: int, size: int) -> dict[str, str]:
    """What the last rank differs in, and what every rank is told."""
    said = {}
    for part, options in DIFFERENT.items():
        said[part] = told(make(**(options if rank == size - 1 else {})))
    return said


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except ab.AnybatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def others(rank: int, size: int) -> dict[str, str]:
    """What is refused on every rank alike."""

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def step_of(model: nn.Module, **options: Any) -> Callable[[], object]:
        def call() -> object:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ab.Step(model, nn.CrossEntropyLoss(), optimizer, **flat(options))((X, Y))

        return call

    hooked, ignoring = DistributedDataParallel(linear()), linear()
    hooked.register_comm_hook(None, fp16_compress_hook)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["bias"])
    with_buffer_hook: Any = DistributedDataParallel(linear())
    with_buffer_hook._register_buffer_comm_hook(None, print)
    with_forward_hook = DistributedDataParallel(linear())
    with_forward_hook.register_forward_hook(lambda *_: None)
    found = linear()
    found.weight.grad = torch.ones(3, 4)
    norm = nn.Sequential(linear(), nn.BatchNorm1d(3))
    sparse = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(3, 3))

    def embedded() -> object:
        optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
        return ab.Step(sparse, nn.CrossEntropyLoss(), optimizer)((Y[:, None], Y))

    def windowed() -> object:
        model = linear()
        model.weight.grad = torch.full((3, 4), float(rank == 0))  # zeros on the others
        step = ab.Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        with step.window() as window:
            window.add((X, Y))
        return window

    class Foreign(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if not rank:
                raise ValueError("\u6570" * 4000)  # longer than a message, of three bytes each
            return super().forward(input)

    sync = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(linear(), nn.BatchNorm1d(3)))
    wrapped = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if not rank:  # alone: the others do not take part
        assert ab.check(wrapped, nn.CrossEntropyLoss(), (X, Y)).exact
        ab.gradient_flow(wrapped, nn.CrossEntropyLoss(), (X, Y))
        ab.plan(wrapped, nn.CrossEntropyLoss(), optimizer, (X, Y), memory="64MB")

    class Fails(ab.GradientFlow):
        def gradients(self, gradients: Any) -> None:
            raise OSError

    def missed() -> object:
        model = linear()  # rank 1 makes no update, and the others do
        callbacks = [Fails(model)] if rank == 1 else []
        step = ab.Step(
            model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks
        )
        with suppress(OSError):
            step((X, Y))
        if rank != 1:
            told(lambda: step((X, Y)))  # that it failed
        return step((X, Y))

    def fails() -> object:
        try:
            return step_of(Foreign(4, 3))()
        except ValueError as error:
            raise ab.AnybatchError(str(error)[:9]) from None

    return {
        "missed": told(missed),
        "window": told(windowed),
        "foreign": told(fails),
        "sync": told(step_of(sync, batch_norm="micro")),
        "lazy": told(step_of(nn.LazyLinear(3))),
        "hook": told(step_of(hooked)),
        "ignoring": told(step_of(DistributedDataParallel(ignoring))),
        "buffer hook": told(step_of(with_buffer_hook)),
        "forward hook": told(step_of(with_forward_hook)),
        "DataParallel": told(step_of(DataParallel(linear()))),
        "found": told(step_of(found)),
        "BatchNorm": told(step_of(norm)),
        "sparse": told(embedded),
        "nothing": repr(make(rows=None)()),
        "after": told(make()),
    }
