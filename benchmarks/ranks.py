"""Time of a step on 2 ranks against DistributedDataParallel with `no_sync`, in turn, at the same cut.

`python -m benchmarks.ranks [--rounds N] [--task NAME ...]` starts two gloo ranks. Each round times a step
of each, after a barrier, in alternating order; printed is the median of the ratios of wall time, rank 0's.
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
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from benchmarks.tasks import TASKS, Batch, Task, make_batch, make_model, split

RANKS = 2
# Rows of each rank, and of its micro-batches.
SIZES = {"mlp": (64, 16), "lenet5": (64, 16), "gpt": (8, 2), "bert": (16, 4)}


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


def measure(rank: int, store: str, names: list[str], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in names:
        task, (rows, micro_batch) = TASKS[name], SIZES[name]
        batch = make_batch(task, rows, seed=rank, ragged=False)
        updates = [make(task, make_model(task, seed=0), micro_batch) for make in (by_hand, with_anybatch)]
        order, ratios = random.Random(0), list[float]()
        for number in range(rounds + 3):  # the first three are not counted
            seconds = [0.0, 0.0]
            for one in order.sample(range(2), 2):
                dist.barrier()
                began = time.perf_counter()
                updates[one](batch)
                seconds[one] = time.perf_counter() - began
            if number >= 3:
                ratios.append(seconds[1] / seconds[0])
        if rank == 0:
            print(f"{name:10} {rows} rows per rank by {micro_batch}: {median(ratios):.3f} of the loop's time")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--task", choices=[*SIZES], nargs="+", default=[*SIZES])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", given.task, given.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
