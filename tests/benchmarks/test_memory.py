"""The benchmarks of memory: a peak that grows is found, each update counts, and a child may end early."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.config import MemoryCase
from benchmarks.contestants import Entry, Update, hand
from benchmarks.memory import memory
from benchmarks.memory_report import child
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


def test_growth_is_found_where_it_is() -> None:
    peaks = memory(CASE, {"hand": hand, "graphs": keeping_graphs}, seed=0)
    assert growth(peaks, "hand") <= CASE.tolerance
    assert growth(peaks, "graphs") > 1


def test_a_child_that_ends_early_is_an_error() -> None:
    assert child("this", ["--child", "bert"]) == []  # `import this` ends well but writes nothing
    assert child("benchmarks.no_such_module", ["--child", "bert"]) == [
        {"model": "bert", "error": "exit code 1"}
    ]
