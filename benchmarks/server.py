"""Push and pull of a parameter server, beside what Ray itself moves: `python -m benchmarks.server [MB]`."""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import Layout, ServerShard, options_of

ROUNDS = 9
UNITS = 8  # whose sums are pushed in an update
NEEDED = 0.25  # of the bandwidth of the engine, merging and dividing included


class Engine:
    """An actor that does nothing but hold an array: what Ray moves at best."""

    def __init__(self, size: int) -> None:
        self.held = np.zeros(size, "float32")

    def pull(self, values: Any) -> None:
        self.held[...] = values

    def push(self) -> Any:
        return self.held

    def take(self, *several: Any) -> None:
        for values in several:
            self.held += values


class Moving:
    """A worker without rows: it writes parameters into tensors, and returns sums as a worker does."""

    def __init__(self, layout: Layout, parameters: list[torch.Tensor]) -> None:
        self.layout, self.parameters = layout, [p.clone() for p in parameters]
        self.sums = np.empty((1, layout.sizes[0]), layout.sum_dtype)

    def pull(self, values: Any) -> None:
        self.layout.write([values], self.parameters)

    def push(self) -> Any:
        self.layout.flat(self.parameters, 0, self.sums[0])
        return self.sums


def main(megabytes: int) -> int:
    """Print seconds and MB/s, interleaved; 1 where the server is too slow."""
    size = megabytes * 10**6 // 4
    parameters = [nn.Parameter(torch.zeros(size // 20)) for _ in range(20)]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    layout = Layout.of(parameters, [sgd], 1, None)
    cluster = RayCluster()
    try:
        shard = cluster.start(ServerShard, layout, 0)
        ours = cluster.start(Moving, layout, [p.detach() for p in parameters])
        engine, other = cluster.start(Engine, size), cluster.start(Engine, size)
        snapshot = [cluster.put(layout.flat(parameters, 0, np.empty(size, "float32"))), [{}] * 20]
        seconds: dict[str, list[float]] = {
            name: [] for name in ("engine pull", "engine push", "pull", "push")
        }

        def timed(name: str, call: Callable[[], list[Any]]) -> Any:
            began = time.perf_counter()
            found = call()
            cluster.get(found[0])
            seconds[name].append(time.perf_counter() - began)
            return found[-1]

        def taken() -> list[Any]:
            sums = [cluster.call(engine, "push")[0] for _ in range(UNITS)]
            return cluster.call(other, "take", *sums)

        def pushed() -> list[Any]:
            sums = [cluster.call(ours, "push")[0] for _ in range(UNITS)]
            return cluster.call(shard, "merge", [1.0], *sums, returns=2)

        for _ in range(ROUNDS):
            for name, process in (("engine pull", engine), ("pull", ours)):
                timed(name, partial(cluster.call, process, "pull", snapshot[0]))
            timed("engine push", taken)
            gradient = timed("push", pushed)
            rest = 1.0, frozenset(range(20)), options_of([sgd])
            snapshot = cluster.call(shard, "update", *snapshot, gradient, *rest, returns=2)
            cluster.get(snapshot[0])
    finally:
        cluster.close()
    best = {name: min(one) for name, one in seconds.items()}
    for name, one in seconds.items():
        print(
            f"{name:12} {megabytes / best[name]:7.0f} MB/s (median {megabytes / statistics.median(one):.0f})"
        )
    ratios = [(a + b) / (c + d) for a, b, c, d in zip(*[seconds[name] for name in seconds], strict=True)]
    ratio = statistics.median(ratios)
    print(f"push plus pull: {ratio:.0%} of what Ray moves (median of {ROUNDS}; best {max(ratios):.0%})")
    return int(ratio < NEEDED)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
