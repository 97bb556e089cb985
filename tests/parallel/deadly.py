"""Servers and workers on Ray that end by `os._exit` at drawn places; the parameters of a small training."""

import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anybatch as ab
from anybatch.parallel import ParameterServer
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import Shard
from anybatch.parallel.worker import Worker
from tests.parallel.inline import Inline

PLACES = [
    *[(f"Worker.{method}", when) for method in ("__init__", "fold") for when in ("before", "after")],
    *[
        (f"Shard.{method}", when)
        for method in ("load", "push", "seal", "commit")
        for when in ("before", "after")
    ],
]


def at(folder: str, name: str, when: str) -> None:
    """End here if it was drawn: a file names the place, and holds how often it is to be passed before."""
    path = Path(folder, f"{name}.{when}")
    try:
        left = int(path.read_text())
    except (FileNotFoundError, ValueError):
        return
    if left > 0:
        path.write_text(str(left - 1))
        return
    try:
        path.rename(f"{path}.done")  # only one can
    except FileNotFoundError:
        return
    os._exit(1)


def deadly(kind: type, folder: str) -> type:
    """The class, whose methods may end the process before or after they are done."""

    def passing(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            at(folder, f"{kind.__name__}.{name}", "before")
            found = getattr(kind, name)(self, *args)
            at(folder, f"{kind.__name__}.{name}", "after")
            return found

        return method

    names = [place.partition(".")[2] for place, _ in PLACES if place.startswith(kind.__name__)]
    return type(kind.__name__, (kind,), {name: passing(name) for name in names})


class Deadly(RayCluster):
    """Ray, with processes that end at drawn places."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.kinds = {kind: deadly(kind, folder) for kind in (Shard, Worker)}

    def start(self, kind: type, *args: Any) -> Any:
        return super().start(self.kinds[kind], *args)


def train(cluster: Any, updates: int, folder: str | None = None, seed: int = 0) -> tuple[str, dict[str, int]]:
    """A hash of parameters and losses after some updates; places are drawn in each if there is a folder."""
    drawn = random.Random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 5)).double()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    server = ParameterServer(2, 2, cluster=cluster, units=4)
    step = ab.Step(model, nn.CrossEntropyLoss(), adam, micro_batch=4, clip_norm=1.0, strategy=server)
    seen: list[Any] = []
    for _ in range(updates):
        if folder is not None:
            name, when = drawn.choice(PLACES)
            Path(folder, f"{name}.{when}").write_text(str(drawn.randint(0, 3)))
        report = step((torch.randn(37, 8).double(), torch.randint(5, (37,))))
        seen += [report.loss, report.grad_norm, report.rows]
    counts = server.counts
    server.stop()
    seen += [p.tolist() for p in model.parameters()]
    return hashlib.blake2b(repr(seen).encode()).hexdigest(), counts


def main(updates: int, seed: int) -> None:
    """Print what became of a training with kills, and of one without, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        found, counts = train(Deadly(folder), updates, folder, seed)
        killed = len([*Path(folder).glob("*.done")])
    expected, _ = train(Inline(seed), updates)
    print(json.dumps({"same": found == expected, "killed": killed, "counts": counts}))


if __name__ == "__main__":
    from tests.parallel import deadly as this

    this.main(*map(int, sys.argv[1:]))
