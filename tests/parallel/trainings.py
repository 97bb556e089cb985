"""Trainings as a rank runs them: called in child processes, each returns plain values"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import anybatch as ab
from anybatch.core import Fold
from tests.parallel.spawned import GROUP_TIMEOUT

ROWS, BATCH = 29, 6  # batches of 6, 6, 6, 6 and 5 rows; on 4 ranks these are 2, 2, 1, 1 and 2, 1, 1, 1
UPDATES = 5  # of an epoch
KINDS = ("rows", "samples", "items", "joined", "few", "whole batch")

#: A metric whose state is no Total: outputs that were largest, counted by class.
COUNTS: Fold[Any, Tensor, float] = Fold(
    init=lambda: torch.zeros(3),
    add=lambda counts, pair: counts + pair[0].argmax(1).bincount(minlength=3),
    merge=torch.add,
    finish=lambda counts: float(counts @ torch.tensor([1.0, 100.0, 10000.0])),
)


def data(kind: str = "rows") -> tuple[Any, Any, dict[str, Any]]:
    """Training and validation data, and a batch size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (ROWS,), generator=generator)
    y[::5] = -100
    if kind == "samples":
        return list(zip(x, y, strict=True)), list(zip(x, y, strict=True))[:11], {"batch_size": BATCH}
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH if kind == "items" else 4, shuffle=True)
    if kind in ("items", "joined"):
        return loader, loader, {"batch_size": None if kind == "items" else BATCH}
    return (x, y), (x[:11], y[:11]), {"batch_size": 2 if kind == "few" else BATCH}


def stacked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch of samples."""
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss in which rows meet."""
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def build(
    kind: str = "rows", strategy: Any = "auto", layer: type[nn.Module] | None = None, **options: Any
) -> Any:
    """The same training in each process."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), (layer or nn.Identity)(), nn.Tanh(), nn.Linear(6, 3)).double()
    step = ab.Step(
        model,
        ab.WholeBatch(spread) if kind == "whole batch" else nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        micro_batch=2,
        clip_norm=1.0,
        collate=stacked if kind == "samples" else None,
        options=ab.Options(strategy=strategy),
    )
    train, validation, size = data(kind)
    settings = {"train": train, "validation": validation, "progress": False, **size}
    return ab.Trainer(step, **settings | options)


class Seen(nn.Module):
    """Notes in a buffer what it has seen."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += x.detach().sum()
        return x


def bits(trainer: Any) -> list[bytes]:
    """The parameters, to be compared as they are."""
    return [p.detach().numpy().tobytes() for p in trainer.step.model.parameters()]


def numbers(trainer: Any, reports: list[Any]) -> dict[str, Any]:
    """What must not depend on the number of ranks, but for rounding."""
    weights = torch.cat([p.detach().flatten() for p in trainer.step.model.parameters()]).tolist()
    values = [value for one in reports for value in (one.loss, *one.validation.values())]
    counts = [trainer.epoch, trainer.steps, trainer.updates, trainer.stopped]
    return {"weights": weights, "values": values, "counts": counts, "bits": bits(trainer)}


def trained(rank: int, size: int, kind: str, strategy: str = "auto", epochs: int = 40) -> dict[str, Any]:
    """A whole training with averaged weights, several metrics and an early end."""
    trainer = build(
        kind,
        strategy,
        callbacks=[
            ab.Metrics(accuracy=ab.accuracy, counts=COUNTS),
            ab.EMA(0.9),
            ab.EarlyStopping("accuracy", patience=2, larger_is_better=True),
        ],
    )
    return numbers(trainer, trainer.fit(epochs=epochs))


def shares(rank: int, size: int, kind: str) -> list[list[int]]:
    """The rows that this rank has of each batch of an epoch."""
    trainer = build(kind)
    known = [tuple(row) for row in data()[0][0].tolist()]
    found = []
    for batch in trainer.train.batches(batch_size=trainer.batch_size, seed=0, epoch=0):
        if kind == "samples" and batch is not None:
            batch = stacked(batch)
        found.append([] if batch is None else [known.index(tuple(row)) for row in batch[0].tolist()])
    return found


@contextmanager
def as_many(rank: int, size: int, count: int, folder: str) -> Iterator[bool]:
    """The first ranks as a group of their own for a while; whether this rank is in it."""

    def start(size: int, name: str) -> None:
        store = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)

    dist.destroy_process_group()
    if rank < count:
        start(count, f"group{count}")
    try:
        yield rank < count
    finally:
        if rank < count:
            dist.destroy_process_group()
        start(size, f"after{count}")


def saved(rank: int, size: int, folder: str, layer: Any = None, epochs: int = 2) -> Any:
    """A run that stops after two epochs, or in the middle of the next one."""
    stop = None if epochs == 2 else Stop(at=2 * UPDATES + 3)
    trainer = build(layer=layer, out=folder, callbacks=[stop] if stop else [])
    return numbers(trainer, trainer.fit(epochs=epochs))


def resumed(
    rank: int, size: int, folder: str, count: int, stores: str, layer: Any = None, until: int = 0
) -> Any:
    """The same run, taken up by another number of ranks, to its end or a batch from which others go on."""
    with as_many(rank, size, count, stores) as is_in:
        if is_in:
            more = {"out": folder, "callbacks": [Stop(until)]} if until else {}
            trainer = build(layer=layer, **more)
            trainer.resume(folder)
            return numbers(trainer, trainer.fit(epochs=4))
    return None


def undisturbed(rank: int, size: int, layer: Any = None, strategy: str = "auto") -> Any:
    """The run that others go on with."""
    trainer = build(layer=layer, strategy=strategy)
    return numbers(trainer, trainer.fit(epochs=4))


def draws(rank: int, size: int) -> list[float]:
    """What a rank draws in its steps."""
    drawn = Draws()
    build(callbacks=[drawn]).fit(epochs=1)
    return drawn.values


class Draws(ab.Callback):
    """Notes a random number of each update."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, report: Any) -> None:
        self.values.append(float(torch.rand(())))


class Stop(ab.Callback):
    """Stops, or raises, after so many updates."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.at, self.error, self.told = at, error, 0

    def start(self, trainer: Any, info: Any) -> None:
        self.trainer = trainer

    def update(self, report: Any) -> None:
        self.told += 1
        if self.told == self.at:
            if self.error is not None:
                raise self.error
            self.trainer.stop("enough")


class Shorter(IterableDataset[Any]):
    """So many batches of ones."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            yield torch.ones(4, 4).double(), torch.ones(4).long()


def refused(rank: int, size: int, case: str, folder: str) -> tuple[str, str, int]:
    """The error of a run in which rank 1 is odd (rank 0 where it writes), and the updates made until then."""
    odd, options = rank == 1, dict[str, Any]()
    if case == "other rows":
        set_ = TensorDataset(*data()[0])
        loader = DataLoader(set_, batch_size=BATCH, sampler=DistributedSampler(set_))
        options = {"train": loader, "batch_size": None}
    elif case == "fewer batches":
        options = {"train": Shorter(2 if odd else 3), "batch_size": None}
    elif case == "stops alone":
        options = {"callbacks": [Stop(3)] if odd else []}
    elif case == "callback fails":
        options = {"callbacks": [Stop(3, ValueError("enough"))] if odd else []}
    elif case == "interrupted":
        options = {"callbacks": [Stop(3, KeyboardInterrupt())] if odd else []}
    elif case == "metric fails":
        wrong = ab.Metrics(wrong=lambda outputs, targets: 1 if odd else ab.accuracy(outputs, targets))
        options = {"callbacks": [wrong]}
    elif case == "cannot write":
        options = {"out": folder, "save_every": 3}
    trainer = build(**options)
    if case == "cannot write" and not rank:
        Path(folder, f".step-{3:08}.tmp").touch()  # in the way
    try:
        trainer.fit(epochs=2)
    except BaseException as error:
        return type(error).__name__, str(error), trainer.steps
    return "", "", trainer.steps


def warned(rank: int, size: int, layer: Any) -> list[str]:
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        build(layer=layer).fit(epochs=2)
    return [str(one.message) for one in found]
