"""Trainings as a rank runs them, replicated or sharded, and as one process does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import anybatch as ab
from anybatch.core import Fold
from tests.laws.check import stack
from tests.parallel.pairs import bits_of, whole
from tests.parallel.spawned import GROUP_TIMEOUT

ROWS, BATCH = 29, 6  # batches of 6, 6, 6, 6 and 5 rows; on 4 ranks these are 2, 2, 1, 1 and 2, 1, 1, 1
UPDATES = 5  # of an epoch

#: A metric whose state is no Total: outputs that were largest, counted by class.
COUNTS: Fold[Any, Tensor, float] = Fold(
    init=lambda: torch.zeros(3),
    add=lambda counts, pair: counts + pair[0].argmax(1).bincount(minlength=3),
    merge=torch.add,
    finish=lambda counts: float(counts @ torch.tensor([1.0, 100.0, 10000.0])),
)


def data(kind: str = "rows") -> dict[str, Any]:
    """Training and validation data, and a batch size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (ROWS,), generator=generator)
    y[::5] = -100
    train, validation, size = (x, y), (x[:11], y[:11]), {"few": 2, "items": None}.get(kind, BATCH)
    if kind == "samples":
        train, validation = ([*zip(*one, strict=True)] for one in (train, validation))
    if kind in ("items", "joined"):
        rows = TensorDataset(x, y)
        train = validation = DataLoader(rows, batch_size=BATCH if kind == "items" else 4, shuffle=True)
    return {"train": train, "validation": validation, "batch_size": size}


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss in which rows meet."""
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def build(way: str, kind: str = "rows", *, layer: Any = nn.Identity, width: int = 6, **options: Any) -> Any:
    """The same training: "replicate", "shard", or "local" in one process."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, width), layer(), nn.Tanh(), nn.Linear(width, 3)).double()
    if way == "shard":
        mesh = DeviceMesh("cpu", [*range(dist.get_world_size())])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)  # rounding stays rounding
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
    strategy = "local" if way == "local" else "auto"
    step = ab.Step(
        model,
        ab.WholeBatch(spread) if kind == "whole batch" else nn.CrossEntropyLoss(),
        optimizer,
        micro_batch=2,
        clip_norm=1.0,
        collate=stack if kind == "samples" else None,
        options=ab.Options(strategy=strategy, check=way == "replicate", scheduler=scheduler),
    )
    return ab.Trainer(step, **data(kind) | {"progress": False} | options)


def numbers(trainer: Any, reports: list[Any] = []) -> dict[str, Any]:  # noqa: B006
    """What must not depend on the number of ranks, but for rounding; and the bits of this run."""
    step, weights = trainer.step, whole(trainer.step.model)
    return {
        "weights": torch.cat([one.flatten() for one in weights]).tolist(),
        "values": [value for one in reports for value in (one.loss, *one.validation.values())],
        "counts": [trainer.epoch, trainer.steps, trainer.updates, trainer.stopped],
        "bits": bits_of(step.model, step.optimizers[0]),
    }


class Stop(ab.Callback):
    """Stops, or raises, after so many updates."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.left, self.error = at, error

    def start(self, trainer: Any, info: Any) -> None:
        self.trainer = trainer

    def update(self, report: Any) -> None:
        self.left -= 1
        if not self.left and self.error is not None:
            raise self.error
        if not self.left:
            self.trainer.stop("enough")


@contextmanager
def as_many(rank: int, size: int, count: int, folder: Path) -> Iterator[bool]:
    """The first ranks as a group of their own for a while; whether this rank is in it."""

    def start(size: int, name: str) -> None:
        store = f"file://{folder}/{name}"  # a new one each time
        patience = 6 * GROUP_TIMEOUT  # the ranks left out wait while the others train
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
        (folder / f"{name}-{rank}").touch()
        while (
            len([*folder.glob(f"{name}-*")]) < size
        ):  # one that leaves at once would break others' connecting
            time.sleep(0.01)

    dist.destroy_process_group()
    if rank < count:
        start(count, f"group{count}")
    try:
        yield rank < count
    finally:
        if rank < count:
            dist.destroy_process_group()
        start(size, f"after{count}")
