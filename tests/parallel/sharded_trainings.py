"""Trainings of sharded models. Called on every rank; each returns plain values."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab
from tests.parallel.cases import digest
from tests.parallel.sharded import whole
from tests.parallel.trainings import COUNTS, Stop, data, stacked

UPDATES = 5  # of an epoch


def build(kind: str = "rows", *, plain: bool = False, layer: Any = nn.Identity, **options: Any) -> Any:
    """The same training for shards, and for one process without."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), layer(), nn.Tanh(), nn.Linear(6, 3)).double()
    if not plain:
        mesh = DeviceMesh("cpu", [*range(dist.get_world_size())])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = ab.Step(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        micro_batch=2,
        clip_norm=1.0,
        collate=stacked if kind == "samples" else None,
        options=ab.Options(
            strategy="local" if plain else "auto",
            check=False,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5),
        ),
    )
    train, validation, size = data(kind)
    return ab.Trainer(step, **{"train": train, "validation": validation, "progress": False, **size} | options)


def numbers(trainer: Any, reports: list[Any]) -> dict[str, Any]:
    """What must not depend on the number of ranks, but for rounding; and the bits of this run."""
    weights = whole(trainer.step.model)
    state = [
        one for p in trainer.step.model.parameters() for one in trainer.step.optimizers[0].state[p].values()
    ]
    everything = [*weights, *[one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]]
    return {
        "weights": torch.cat([one.flatten() for one in weights]).tolist(),
        "values": [value for one in reports for value in (one.loss, *one.validation.values())],
        "counts": [trainer.epoch, trainer.steps, trainer.updates, trainer.stopped],
        "bits": digest(everything),
    }


def trained(rank: int, size: int, kind: str, plain: bool = False) -> dict[str, Any]:
    """A whole training with several metrics, which ends early."""
    callbacks = [
        ab.Metrics(accuracy=ab.accuracy, counts=COUNTS),
        ab.EarlyStopping("accuracy", patience=2, larger_is_better=True),
    ]
    trainer = build(kind, plain=plain, callbacks=callbacks)
    return numbers(trainer, trainer.fit(epochs=40))


def saved(rank: int, size: int, folder: str, epochs: int = 2, **options: Any) -> Any:
    """A run of two epochs, or one that is stopped in the middle of the third."""
    callbacks = [] if epochs == 2 else [Stop(at=2 * UPDATES + 3)]
    trainer = build(out=folder, callbacks=callbacks, **options)
    return numbers(trainer, trainer.fit(epochs=epochs))
