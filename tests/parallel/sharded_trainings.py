"""Trainings of sharded models. Called on every rank; each returns plain values."""

import os
import shutil
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab
from anybatch.core import RankError
from anybatch.parallel.stored import write_tensors as stored_write
from tests.parallel.cases import digest
from tests.parallel.sharded import said_by, whole
from tests.parallel.trainings import COUNTS, Stop, as_many, data, stacked

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


class Resharded(ab.Callback):
    """Finds shards, also after the forwards of a validation."""

    def epoch(self, trainer: Any, report: Any) -> None:
        is_sharded = trainer.step.strategy.is_lockstep
        assert all(hasattr(p, "device_mesh") == is_sharded for p in trainer.step.model.parameters())


def trained(rank: int, size: int, kind: str, plain: bool = False) -> dict[str, Any]:
    """A whole training with several metrics, which ends early."""
    callbacks = [
        ab.Metrics(accuracy=ab.accuracy, counts=COUNTS),
        ab.EarlyStopping("accuracy", patience=2, larger_is_better=True),
        Resharded(),
    ]
    trainer = build(kind, plain=plain, callbacks=callbacks)
    return numbers(trainer, trainer.fit(epochs=40))


def saved(rank: int, size: int, folder: str, epochs: int = 2, **options: Any) -> Any:
    """A run of two epochs, or one that is stopped in the middle of the third."""
    callbacks = [] if epochs == 2 else [Stop(at=2 * UPDATES + 3)]
    trainer = build(out=folder, callbacks=callbacks, **options)
    reports = trainer.fit(epochs=epochs)
    return numbers(trainer, reports)


def resumed(
    rank: int, size: int, folder: str, count: int, stores: str, plain: bool = False, until: int = 0
) -> Any:
    """The same run, taken up by another number of ranks: as it was loaded, and at its end or later."""
    with as_many(rank, size, count, stores) as is_in:
        if not is_in:
            return None
        trainer = build(plain=plain, out=folder, callbacks=[Stop(until)] if until else [])
        trainer.resume(folder if plain else max(Path(folder).glob("step-*")))
        loaded = numbers(trainer, [])
        return loaded, numbers(trainer, trainer.fit(epochs=4))


class Bits(ab.Callback):
    """Notes the bits of each update; on all ranks, which gather them."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}

    def start(self, trainer: Any, info: Any) -> None:
        self.trainer = trainer

    def update(self, report: Any) -> None:
        self.found[self.trainer.steps] = numbers(self.trainer, [])["bits"]


def dying(place: str, left: int) -> AbstractContextManager[Any]:
    """Kill this process by SIGKILL the next time but some that a save comes to a place."""
    replace, remove, count = os.replace, shutil.rmtree, [left]

    def reap(*_: Any) -> None:
        count[0] -= 1
        if not count[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def replaced(source: Any, target: Any) -> None:
        is_it = Path(target).name.startswith("step-")
        if is_it and place == "before the rename":
            reap()
        replace(source, target)
        if is_it and place == "after the rename":
            reap()

    def removed(path: Any, **options: Any) -> None:
        if Path(path).name.startswith("step-"):
            next(Path(path).iterdir()).unlink()
            reap()
        remove(path, **options)

    if place == "its shards are written":
        return mock.patch("anybatch.parallel.stored.os.fsync", reap)
    if place == "an old one is deleted":
        return mock.patch("anybatch.parallel.checkpoint.shutil.rmtree", removed)
    return mock.patch("anybatch.parallel.checkpoint.os.replace", replaced)


def killed(rank: int, size: int, folder: str, at: int, place: str, left: int) -> tuple[str, dict[int, str]]:
    """A rank is killed while it saves; what others are told, and the bits of all updates."""
    bits = Bits()
    trainer = build(out=folder, save_every=1, callbacks=[bits])
    with dying(place, left) if rank == at else nullcontext():
        try:
            trainer.fit(epochs=4)
        except RankError as error:
            return str(error), bits.found
    return "", bits.found


class Loader:
    """Batches, and an error on one rank after some."""

    def __init__(self, fails_after: int | None) -> None:
        self.fails_after = fails_after

    def __iter__(self) -> Any:
        for number in range(UPDATES):
            if number == self.fails_after:
                raise ValueError("no more")
            torch.manual_seed(number)
            yield torch.randn(6, 4).double(), torch.randint(3, (6,))


class Failing(ab.Callback):
    """Raises right after an update, in the step."""

    def __init__(self) -> None:
        self.left = 3

    def parameters(self, parameters: Any) -> None:
        self.left -= 1
        if not self.left:
            raise ValueError("no parameters")


def on_a_full_disk(path: Path, tensors: Any) -> str:
    """Write to a file whose device has no room; the kernel says so."""
    path.symlink_to("/dev/full")
    return stored_write(path, tensors)


def failed(rank: int, size: int, case: str, folder: str) -> dict[str, Any]:
    """A training in which rank 1 fails in its own way (rank 0 where it writes); what was said and saved."""
    odd, options = rank == 1, dict[str, Any](save_every=2, out=folder) if folder else {}
    if case == "callback":
        options["callbacks"] = [Stop(3, ValueError("enough"))] if odd else []
    elif case == "stop":
        options["callbacks"] = [Stop(3)]
    elif case == "signal":
        options["callbacks"] = [lambda report: signal.raise_signal(signal.SIGTERM)] if odd else []
    elif case == "data":
        options |= {"train": Loader(3 if odd else None), "batch_size": None}
    elif case == "parameters":
        options["callbacks"] = [Failing()] if odd else []
    elif case == "metric":
        options["callbacks"] = [
            ab.Metrics(wrong=lambda outputs, targets: 1 if odd else ab.accuracy(outputs, targets))
        ]
    trainer = build(**options)
    if case == "forward" and odd:
        passes = iter((None, None, ValueError("no forward")))

        def fail(module: Any, inputs: Any) -> None:
            if (error := next(passes, None)) is not None:
                raise error

        trainer.step.model[0].register_forward_pre_hook(fail)
    patch = mock.patch("anybatch.parallel.checkpoint.os.replace", side_effect=OSError(28, "No space left"))
    if case == "disk":
        patch = mock.patch("anybatch.parallel.stored.write_tensors", on_a_full_disk)
    began, told = time.monotonic(), {"said": "", "error": ""}
    try:
        with patch if (case, rank) in (("write", 0), ("disk", 1)) else nullcontext():
            trainer.fit(epochs=2)
    except BaseException as error:
        told |= {"error": type(error).__name__, "said": str(error)}
    told |= {"seconds": time.monotonic() - began, "steps": trainer.steps}
    told["saved"] = sorted(one.name for one in Path(folder).glob("step-*"))
    return told


def refused(rank: int, size: int, folder: str) -> dict[str, str]:
    """What every rank is told."""
    build(out=folder).fit(epochs=1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    options = ab.Options(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, options=options)
    other = ab.Trainer(step, data()[0], batch_size=6, progress=False)
    same = build(seed=1)
    before = numbers(same, [])["bits"]
    cases = {
        "averaged": lambda: build(callbacks=[ab.EMA()]).fit(epochs=1),
        "another run": lambda: build(out=folder).fit(epochs=1),
        "another seed": lambda: same.resume(folder),
        "another model": lambda: other.resume(folder),
    }
    return said_by(cases) | {"unchanged": str(numbers(same, [])["bits"] == before)}
