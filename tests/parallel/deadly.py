"""Servers, workers and drivers on Ray that end at drawn places: `python -m tests.parallel.deadly SEED N P`.

A training goes on in one process after the other, from the last checkpoint. The first N end at a drawn place,
and workers and servers meanwhile, in a share P of the updates. The end is that of a training in which nothing
ended, and no process stays. How many ended is JSON.
"""

import json
import os
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from anybatch import EMA
from anybatch.parallel import ParameterServer, parameter_server
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.scheduler import Scheduler
from anybatch.parallel.server import ServerShard
from anybatch.parallel.worker import Worker
from tests.parallel.inline import Inline
from tests.parallel.mortal_saves import assert_same_end, lived
from tests.train.runs import EPOCHS, TRAIN, make_rows, make_step, make_trainer

METHODS: dict[type, list[Callable[..., Any]]] = {  # not their names, so that a new name is noticed
    Worker: [Worker.__init__, Worker.fold],
    ServerShard: [ServerShard.merge, ServerShard.update],
    Scheduler: [Scheduler.fold, Scheduler.merge, Scheduler.update],
    ParameterServer: [ParameterServer._updated],  # the driver's model has the parameters
}
BOTH = "before", "after"
WORKERS, SERVERS, SCHEDULER, WRITTEN = (
    [f"{kind.__name__}.{call.__name__} {when}" for call in calls for when in BOTH]
    for kind, calls in METHODS.items()
)
WORKERS += ["Worker.forward before"] * 2
DRIVERS = [*SCHEDULER, *WRITTEN, *(f"checkpoint {when}" for when in BOTH)]
KINDS = {"workers": WORKERS, "servers": SERVERS, "drivers": DRIVERS}
ENDED = 3  # exit code
GONE_S = 20  # in which processes end after their driver, but for two:
AGENTS = b"agent", b"Agent"  # of Ray, which try for a minute to tell a server that is gone
AGENTS_S = 90


def at(folder: str, place: str) -> None:
    """End here if it was drawn: a file names the place, and holds how often it is to be passed before."""
    path = Path(folder, place)
    with suppress(FileNotFoundError, ValueError):  # only one process can rename it
        left = int(path.read_text())
        if left > 0:
            path.write_text(str(left - 1))
            return
        path.rename(f"{path}, {uuid.uuid4()}")
        os._exit(ENDED)


def passing(folder: str, place: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but the process may end before or after it."""

    def method(first: Any, *args: Any, **options: Any) -> Any:  # Ray wants a name for self
        at(folder, f"{place} before")
        found = call(first, *args, **options)
        at(folder, f"{place} after")
        return found

    return method


def deadly(kind: Any, folder: str) -> Any:
    """The class, whose methods may end the process."""

    def hooked(self: Any, *args: Any) -> None:
        kind.__init__(self, *args)
        self._step.model.register_forward_pre_hook(lambda *_: at(folder, "Worker.forward before"))

    calls = {call.__name__: call for call in METHODS[kind]}
    if kind is Worker:
        calls["__init__"] = hooked
    methods = {name: passing(folder, f"{kind.__name__}.{name}", call) for name, call in calls.items()}
    return type(kind.__name__, (kind,), methods)


class Deadly(RayCluster):
    """Ray, with processes that end at drawn places."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.kinds = {kind: deadly(kind, folder) for kind in (ServerShard, Worker)}

    def start(self, kind: type, *args: Any) -> Any:
        return super().start(self.kinds[kind], *args)


def train(out: Path, server: ParameterServer) -> None:
    """To the end, from where the last one came to."""
    step = make_step("AdamW", batch_norm="frozen", micro_batch=1, strategy=server)
    rows = DataLoader(TensorDataset(*make_rows(TRAIN)), batch_size=3, shuffle=True)
    trainer = make_trainer(out, step=step, train=rows, callbacks=[EMA(0.9)], save_every=1, keep=2)
    if [*out.glob("step-*")]:
        trainer.resume(out)
    trainer.fit(epochs=EPOCHS)
    server.stop()


def live(out: Path, folder: str, seed: str, share: float, mark: str, is_mortal: bool) -> None:
    """A training in which workers and servers end, and the driver, if it is mortal."""
    os.environ.update([mark.split("=")])
    draw = random.Random(seed)

    def plant(kind: str, most: int) -> None:
        Path(folder, draw.choice(KINDS[kind])).write_text(str(draw.randint(0, most)))

    class Drawn(deadly(ParameterServer, folder)):
        def carry_out_elsewhere(self, *args: Any) -> Any:
            for kind, most in (("workers", 3), ("servers", 1)):
                if draw.random() < share:
                    plant(kind, most)
            return super().carry_out_elsewhere(*args)

    if is_mortal:
        plant("drivers", 4)
    parameter_server.Scheduler = deadly(Scheduler, folder)
    os.replace = passing(folder, "checkpoint", os.replace)
    train(out, Drawn(2, 2, cluster=Deadly(folder), units=4))


def having(mark: str) -> dict[int, bytes]:
    """Processes with this in their environment, and their commands."""
    found: dict[int, bytes] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
        except OSError:
            continue
    return found


def stay(mark: str, seconds: float, but: tuple[bytes, ...] = ()) -> dict[int, bytes]:
    """Processes with this in their environment after so long, but for some; none as soon as there is none."""
    until = time.monotonic() + seconds
    while True:
        left = {pid: command for pid, command in having(mark).items() if not any(x in command for x in but)}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def main(seed: int, deaths: int, share: float) -> None:
    """Print how many processes ended; fails where that changed anything, or where one stays."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as places:
        folder = Path(name)
        train(folder / "undisturbed", ParameterServer(2, 2, cluster=Inline(seed), units=4))
        codes = list[int]()
        while not codes or codes[-1]:
            mark = f"ANYBATCH_LIFE={uuid.uuid4()}"
            is_mortal = len(codes) < deaths
            life = partial(live, folder / "served", places, f"{seed} {len(codes)}", share, mark, is_mortal)
            codes += lived(life)
            left = stay(mark, GONE_S, AGENTS)
            assert not left, f"after {GONE_S} s there are {left}"
            assert codes[-1] in ((0, ENDED) if is_mortal else (0,)), codes
        assert_same_end(folder, "served")
        ended = Counter(one.name.split(",")[0] for one in Path(places).iterdir() if "," in one.name)
    counts = {kind: sum(ended[place] for place in drawn) for kind, drawn in KINDS.items()}
    assert counts["drivers"] == len(codes) - 1, (counts, codes)
    print(json.dumps({"ended": counts, "places": ended}))


if __name__ == "__main__":
    from tests.parallel import deadly as this

    this.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
