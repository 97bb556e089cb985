"""A small training that can be stopped anywhere, and what two of them must agree in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from anybatch import Callback, Step, StepReport
from anybatch.core import EpochReport, RunInfo
from anybatch.state import rng
from anybatch.train.metrics import Metrics, accuracy
from anybatch.train.trainer import Trainer
from tests.options import flat
from tests.snapshots import changes, same, snapshot

FEATURES, CLASSES = 3, 4
TRAIN, VALIDATION, BATCH = 14, 7, 6  # batches of 6, 6 and 2 rows: the last is shorter than a micro-batch
UPDATES = 3  # of an epoch
EPOCHS = 4

Scheduler = Callable[[Optimizer], LRScheduler]
KINDS: dict[str, tuple[Callable[..., Optimizer], Scheduler]] = {
    "SGD with momentum": (
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.7),
    ),
    "AdamW": (
        lambda parameters: AdamW(parameters, lr=0.01),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * UPDATES),
    ),
}


def make_rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return x, torch.where(torch.rand(count, generator=generator) < 0.2, -100, y)


def make_step(kind: str = "SGD with momentum", **options: Any) -> Step:
    """With dropout, so that random numbers must be the same, and buffers that every forward changes."""
    torch.manual_seed(3)
    layers = (nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, CLASSES))
    model = nn.Sequential(*layers)
    make_optimizer, make_scheduler = KINDS[kind]
    optimizer = make_optimizer(model.parameters())
    settings: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "micro_batch": 3, "batch_norm": "micro"}
    settings |= {"scheduler": make_scheduler(optimizer)} | options
    return Step(model, optimizer=optimizer, **flat(settings))


def listening(tell: Callable[[Any], object]) -> Any:
    """A callback that tells all events of a step."""
    return SimpleNamespace(micro_batch=tell, redone=tell, update=tell)


def make_trainer(out: Path | None = None, kind: str = "SGD with momentum", **options: Any) -> Trainer:
    """The same run each time, from fresh objects."""
    of_step = {name: options.pop(name) for name in ("loss", "micro_batch") if name in options}
    if "listen" in options:
        of_step["callbacks"] = [listening(options.pop("listen"))]
    step = options.pop("step", None) or make_step(kind, **of_step)
    rows = {"train": make_rows(TRAIN), "validation": make_rows(VALIDATION, seed=1)}
    settings: dict[str, Any] = rows | {"batch_size": BATCH, "seed": 5, "out": out, "progress": False}
    metrics = Metrics(**options.pop("metrics", {"accuracy": accuracy}))
    options["callbacks"] = [metrics, *options.get("callbacks", [])]
    return Trainer(step, **settings | options)


def state(trainer: Trainer) -> dict[str, Any]:
    """All that must be the same, bit for bit, whether or not the run was stopped."""
    found = snapshot(trainer.step)
    for name in ("Python", "NumPy"):  # each program begins them elsewhere, and no training draws from them
        del found[f"random state of {name}"]
    return found | {"epoch": trainer.epoch, "updates": trainer.updates, "best": trainer.best}


def timeless(reports: Sequence[EpochReport]) -> list[EpochReport]:
    return [replace(report, seconds=0.0, samples_per_second=0.0) for report in reports]


class End(NamedTuple):
    state: dict[str, Any]
    reports: list[EpochReport]


def finished(**options: Any) -> End:
    with rng.preserved():
        trainer = make_trainer(**options)
        reports = timeless(trainer.fit(epochs=EPOCHS))
        return End(state(trainer), reports)


@cache
def undisturbed(kind: str = "SGD with momentum", micro_batch: int | None = 3) -> End:
    return finished(kind=kind, micro_batch=micro_batch)


def assert_same_end(trainer: Trainer, reports: Sequence[EpochReport], end: End) -> None:
    found = changes(end.state, state(trainer))
    assert not found, found
    assert reports, "no epoch was left"
    expected = end.reports[-len(reports) :]
    assert same(timeless(reports), expected), (reports, expected)


class Diary(Callback):
    """Writes down what a callback is told; calls `then` at an event, as at `("update", 3)`, the third."""

    def __init__(self, at: tuple[str, int] = ("never", 0), then: Callable[[], None] = lambda: None) -> None:
        self.events: list[str] = []
        self.told: list[RunInfo | StepReport | EpochReport] = []
        self.at, self.then = at, then

    def start(self, trainer: Trainer, info: RunInfo) -> None:
        self._note("start", info)

    def update(self, report: StepReport) -> None:
        self._note("update", report)

    def epoch(self, trainer: Trainer, report: EpochReport) -> None:
        self._note("epoch", report)

    def stop(self, trainer: Trainer) -> None:
        self._note("stop")

    def _note(self, event: str, *told: Any) -> None:
        self.events.append(event)
        self.told.extend(told)
        if self.at == (event, self.events.count(event)):
            self.then()


class Killed(BaseException):
    """A process that ends here: no handler of errors catches it, and not even a stop is carried out."""


def raising(error: BaseException) -> Callable[[], None]:
    def throw() -> None:
        raise error

    return throw


def stopped(at: tuple[str, int], error: BaseException) -> Callback:
    return Diary(at, raising(error))
