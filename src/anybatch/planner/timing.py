"""A short measured run: seconds of a micro-batch under several plans, in turn; nothing is changed by it."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anybatch.core import Batch, SampleBatch, TensorBatch, tree
from anybatch.engine import Before, Plan, Task, execute
from anybatch.state import ObjectState, rng

ROUNDS = 5


def repeated(batch: Batch, rows: int) -> Batch:
    """A batch of so many rows: the first ones, from the start again where there are not enough.

    Example:
        >>> repeated(TensorBatch(torch.arange(3)), 5).whole
        tensor([0, 1, 2, 0, 1])
    """
    if rows <= batch.rows:
        return batch.head(rows)
    if isinstance(batch, SampleBatch):
        return SampleBatch([batch.given[row % batch.rows] for row in range(rows)], batch.collate)
    places = torch.arange(rows) % batch.rows
    return TensorBatch(tree.map_leaves(lambda leaf: leaf[places.to(leaf.device)], batch.whole))


def seconds_per_row(plans: Sequence[Plan], task: Task, batch: Batch, *, limit_s: float) -> list[float | None]:
    """Median seconds per row of forward and backward under each plan, without the update.

    A cut plan is timed on two micro-batches, so that adding to gradients which are there already is part of
    it. The plans take turns, so that a busy moment of the machine hits all of them. They run on copies of
    the rows. Model, buffers, gradients, random streams and what else a forward reaches are as before.

    Args:
        plans: of any number of rows; only their first micro-batches are run.
        task: what they are carried out on.
        batch: rows to run; repeated where there are too few.
        limit_s: no round begins after so many seconds.

    Returns:
        Seconds per row for each plan; None for those that were not reached, or ran out of memory.
    """
    quiet = replace(task, optimizers=(), schedulers=(), listeners=(), scale=task.scale.copy())
    noted = _noted(quiet, batch)
    times: list[list[float]] = [[] for _ in plans]
    failed: set[int] = set()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for index, plan in enumerate(plans):
            enough = times[index] and time.perf_counter() - start > limit_s
            if enough or index in failed or time.perf_counter() - start > 2 * limit_s:
                continue
            try:
                times[index].append(_once(plan, quiet, batch))
            except Exception:  # the step meets it again, and says what is to be said
                failed.add(index)
            finally:
                noted.put_back()
    # The first run warms caches up; where there are more it is no measure.
    return [
        None if index in failed or not found else statistics.median(found[1:] or found)
        for index, found in enumerate(times)
    ]


def _once(plan: Plan, task: Task, batch: Batch) -> float:
    rows = min(plan.rows, 2 * plan.micro_batch)
    few = _copied(repeated(batch, rows))
    short = replace(plan, rows=rows, micro_batch=min(plan.micro_batch, rows), cut=())
    before, random = Before(task), rng.capture_process()
    try:
        _wait(task)
        start = time.perf_counter()
        execute(short, task, few)
        _wait(task)
        return (time.perf_counter() - start) / rows
    finally:
        before.put_back()
        before.put_gradients_back()
        rng.restore_process(random)


def _noted(task: Task, batch: Batch) -> ObjectState:
    """All that a run reaches; the task's own parameters and buffers are put back otherwise."""
    collate = (batch.collate,) if isinstance(batch, SampleBatch) else ()
    known = [p for module in task.modules for p in (*module.parameters(), *module.buffers())]
    return ObjectState([task.model, task.loss, *task.modules, *collate], but_for=known)


def _copied(batch: Batch) -> Batch:
    """The same rows in memory of their own: a model may work in place on its input."""
    if isinstance(batch, SampleBatch):
        collate = batch.collate
        return SampleBatch(batch.given, lambda samples: tree.map_leaves(_copy, collate(samples)))
    return TensorBatch(tree.map_leaves(_copy, batch.whole))


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _wait(task: Task) -> None:
    for device in task.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
