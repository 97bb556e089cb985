"""Tests of the peak of an update: flat for the hand-written loop, and a leak shows."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.config import MemoryCase
from benchmarks.contestants import Entry, Update, hand
from benchmarks.memory import memory
from benchmarks.tasks import Batch
from benchmarks.thresholds import growth

CASE = MemoryCase(task="mlp", rows=8, few=2, many=8)


def keeping_graphs(entry: Entry) -> Update:
    """The loop that adds up losses with their graphs: every micro-batch stays until the end."""

    def update(batch: Batch) -> float:
        losses: list[Tensor] = []
        for x, y in zip(batch[0].split(entry.rows), batch[1].split(entry.rows), strict=True):
            losses.append(F.cross_entropy(entry.model(x), y, reduction="sum"))
        sum(losses[1:], losses[0]).backward()
        entry.optimizer.step()
        entry.optimizer.zero_grad(set_to_none=True)
        return 0.0

    return update


def copying_the_batch(entry: Entry) -> Update:
    update = hand(entry)
    return lambda batch: update((batch[0].clone(), batch[1].clone()))


def test_growth_is_found_where_it_is() -> None:
    peaks = memory(CASE, {"hand": hand, "graphs": keeping_graphs, "copy": copying_the_batch}, seed=0)
    assert growth(peaks, "hand") <= CASE.tolerance
    assert growth(peaks, "graphs") > 1
    assert growth(peaks, "copy") > 0.25  # the batch is about half of what lives at the peak


def test_what_is_held_and_what_stands_apart() -> None:
    peaks = memory(CASE, {"hand": hand}, seed=0)
    assert peaks.held == 4 * (16 * 32 + 32 + 32 * 4 + 4)  # plain SGD keeps no state
    momentum = memory(MemoryCase(task="lenet5", rows=1, few=1, many=1), {"hand": hand}, seed=0)
    assert momentum.held == 2 * 4 * 61_706  # LeNet-5's parameters, and as many numbers of momentum
    assert peaks.batch == (2 * 8 * (16 * 4 + 8), 8 * 8 * (16 * 4 + 8))  # float32 inputs, int64 labels
