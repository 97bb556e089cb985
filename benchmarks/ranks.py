"""Time of a step on ranks against a loop of torch's own, in turn, at the same cut.

`python -m benchmarks.ranks [--rounds N] [--task NAME ...] [--parts N ...] [--shard] [--slow] [--ranks N]`
starts gloo ranks, two if not told otherwise. The loop is that of DistributedDataParallel with `no_sync`, or,
with `--shard`, that of `fully_shard`, which reduces in every micro-batch. With `--slow` the network has 10
Gbit/s and 100 us, and a third contestant is the step without overlap. Each round times a step of each, after
a barrier, in random order; printed are the medians of the ratios of wall and CPU time of rank 0, and what
was sent in a step. `--model` prints what a ring and a tree of many ranks would take for it.
"""

import argparse
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from benchmarks import slow
from benchmarks.tasks import TASKS, Batch, Task, make_batch, make_model, split

ROWS = {"mlp": 64, "lenet5": 64, "gpt": 8, "bert": 16, "4M": 64, "25M": 32}  # of each rank
WIDE = {"4M": (16, 512), "25M": (24, 1024)}  # layers and their width
FIRST = 5  # rounds that are not counted
MANY = (2, 8, 64, 1024)  # ranks of `--model`


def shard(model: nn.Module) -> nn.Module:
    """Shard the blocks in lists of the model, then the model."""
    for blocks in [one for one in model.modules() if isinstance(one, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block)
    return fully_shard(model)


def by_hand_sharded(task: Task, model: nn.Module, micro_batch: int) -> Callable[[Batch], None]:
    """The loop over micro-batches that `fully_shard` needs, which averages over ranks."""
    sharded = shard(model)
    optimizer = task.optimizer(sharded.parameters())

    def update(batch: Batch) -> None:
        micros = [*split(batch, micro_batch)]
        for micro in micros:
            (task.mean(sharded, micro) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def sharded_with_anybatch(task: Task, model: nn.Module, micro_batch: int) -> Callable[[Batch], Any]:
    return with_anybatch(task, shard(model), micro_batch)


def by_hand(task: Task, model: nn.Module, micro_batch: int) -> Callable[[Batch], None]:
    """The loop that DistributedDataParallel's documentation shows: the mean of means."""
    replica = DistributedDataParallel(model)
    optimizer = task.optimizer(model.parameters())

    def update(batch: Batch) -> None:
        micros = [*split(batch, micro_batch)]
        for index, micro in enumerate(micros):
            with replica.no_sync() if index + 1 < len(micros) else nullcontext():
                (task.mean(replica, micro) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def with_anybatch(task: Task, model: nn.Module, micro_batch: int) -> Callable[[Batch], Any]:
    step = ab.Step(model, task.loss, task.optimizer(model.parameters()), micro_batch=micro_batch)
    return step


def without_overlap(task: Task, model: nn.Module, micro_batch: int) -> Callable[[Batch], Any]:
    step = with_anybatch(task, model, micro_batch)
    step.strategy.flow = lambda ahead: None
    return step


def wide(layers: int, width: int) -> Task:
    """A network of equal layers, whose gradient is large for the time that it takes."""

    def model() -> nn.Module:
        return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())])

    def batch(rows: int, generator: torch.Generator, ragged: bool) -> Batch:
        return torch.randn(rows, width, generator=generator), torch.randint(
            width, (rows,), generator=generator
        )

    return replace(TASKS["mlp"], model=model, batch=batch)


def measure(rank: int, store: str, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    network: Any = None
    if given.slow:
        network = slow.start(store, rank, given.ranks)
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks)
    makers = {"the loop": by_hand_sharded, "anybatch": sharded_with_anybatch}
    if not given.shard:
        makers = {"the loop": by_hand, "anybatch": with_anybatch}
        makers |= {"anybatch without overlap": without_overlap} if given.slow else {}
    for name, parts in product(given.task, given.parts):
        task, rows = wide(*WIDE[name]) if name in WIDE else TASKS[name], ROWS[name]
        batch = make_batch(task, rows, seed=rank, ragged=False)
        updates = {key: make(task, make_model(task, seed=0), rows // parts) for key, make in makers.items()}
        order, wall, cpu = random.Random(0), defaultdict(list), defaultdict(list)
        sent = dict[str, Any]()
        for number in range(given.rounds + FIRST):
            for one in order.sample([*updates], len(updates)):
                dist.barrier()
                before = Counter(network.sent) if network else Counter()
                began, worked = time.perf_counter(), time.process_time()
                updates[one](batch)
                if number >= FIRST:
                    wall[one].append(time.perf_counter() - began)
                    cpu[one].append(time.process_time() - worked)
                sent[one] = dict(network.sent - before) if network else {}
        for one in updates if rank == 0 else ():
            ratios = [
                median([a / b for a, b in zip(found[one], found["the loop"], strict=True)])
                for found in (wall, cpu)
            ]
            print(
                f"{name:7} {rows} rows by {rows // parts:3}, {one:24}: {ratios[0]:.3f} of the loop's time "
                f"({1000 * median(wall[one]):.1f} ms), {ratios[1]:.3f} of its CPU time {sent[one] or ''}",
                flush=True,
            )
    dist.destroy_process_group()


def predict() -> None:
    """Print the time that collectives of a step take on many ranks, by the model of `slow`."""
    for name, (layers, width) in WIDE.items():
        nbytes = 4 * layers * (width * width + width)
        for ranks, is_tree in product(MANY, (False, True)):
            message = slow.seconds("allgather", 4096, ranks, is_tree=is_tree)
            buckets = -(-nbytes // (8 << 20)) * slow.seconds("allreduce", 0, ranks, is_tree=is_tree)
            whole = buckets + slow.seconds("allreduce", nbytes, ranks, is_tree=is_tree)
            print(
                f"{name:4} {ranks:5} ranks, {'tree' if is_tree else 'ring'}: message "
                f"{1000 * message:.2f} ms, gradients {1000 * whole:.1f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--task", choices=[*ROWS], nargs="+", default=["mlp", "lenet5", "gpt", "bert"])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4], help="micro-batches of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shard", action="store_true", help="against fully_shard")
    parser.add_argument("--slow", action="store_true", help="a network of 10 Gbit/s and 100 us")
    parser.add_argument("--model", action="store_true", help="only predict, for many ranks")
    given = parser.parse_args()
    if given.model:
        predict()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", given), nprocs=given.ranks)


if __name__ == "__main__":
    main()
