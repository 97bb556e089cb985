"""Time of a step on 2 ranks against a loop of torch's own, in turn, at the same cut.

`python -m benchmarks.ranks [--rounds N] [--task NAME ...] [--shard]` starts two gloo ranks. The loop is that
of DistributedDataParallel with `no_sync`, or, with `--shard`, that of `fully_shard`, which reduces in every
micro-batch. Each round times a step of each, after a barrier, in alternating order; printed are the medians
of the ratios of wall and CPU time of rank 0.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from benchmarks.tasks import TASKS, Batch, Task, make_batch, make_model, split

RANKS = 2
# Rows of each rank, and of its micro-batches.
SIZES = {"mlp": (64, 16), "lenet5": (64, 16), "gpt": (8, 2), "bert": (16, 4)}


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


def measure(rank: int, store: str, names: list[str], rounds: int, is_sharded: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in names:
        task, (rows, micro_batch) = TASKS[name], SIZES[name]
        batch = make_batch(task, rows, seed=rank, ragged=False)
        makers = (by_hand_sharded, sharded_with_anybatch) if is_sharded else (by_hand, with_anybatch)
        updates = [make(task, make_model(task, seed=0), micro_batch) for make in makers]
        order, ratios, of_cpu = random.Random(0), list[float](), list[float]()
        for number in range(rounds + 3):  # the first three are not counted
            seconds, cpu = [0.0, 0.0], [0.0, 0.0]
            for one in order.sample(range(2), 2):
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                updates[one](batch)
                seconds[one] = time.perf_counter() - began
                cpu[one] = time.process_time() - worked
            if number >= 3:
                ratios.append(seconds[1] / seconds[0])
                of_cpu.append(cpu[1] / cpu[0])
        if rank == 0:
            found = f"{median(ratios):.3f} of the loop's time, {median(of_cpu):.3f} of its CPU time"
            print(f"{name:10} {rows} rows per rank by {micro_batch}: {found}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--task", choices=[*SIZES], nargs="+", default=[*SIZES])
    parser.add_argument("--shard", action="store_true", help="against fully_shard")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", given.task, given.rounds, given.shard), nprocs=RANKS)


if __name__ == "__main__":
    main()
