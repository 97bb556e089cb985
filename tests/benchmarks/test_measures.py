"""What the benchmarks measure: who errs is found, a peak that grows is found, and a child may end early."""

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from benchmarks import history
from benchmarks.config import FULL, MemoryCase, RaceCase
from benchmarks.contestants import Entry, Update, hand
from benchmarks.exactness import exactness
from benchmarks.memory import memory
from benchmarks.memory_report import child
from benchmarks.tasks import Batch, split
from benchmarks.thresholds import growth

ROOT = Path(__file__).parents[2]
CASE = RaceCase(name="mlp", task="mlp", rows=8, micro_batches=4, threshold=1.0)


def mean_of_means(entry: Entry) -> Update:
    def update(batch: Batch) -> float:
        for micro in split(batch, entry.rows):
            (entry.task.mean(entry.model, micro) / entry.micro_batches).backward()
        entry.optimizer.step()
        entry.optimizer.zero_grad()
        return 0.0

    return update


def twice(entry: Entry) -> Update:
    update = hand(entry)
    return lambda batch: update(batch) + update(batch)


def test_those_who_err_are_found() -> None:
    """A mean of means is exact only for equal weights."""
    errors = exactness(CASE, {"hand": hand, "mean": mean_of_means, "twice": twice}, seed=0)
    assert errors.gradient["hand"] <= FULL.gradient_error
    assert errors.gradient["mean"] > 0.05
    assert errors.parameters["mean"] <= FULL.parameter_error < errors.parameters["twice"]


GROWING = MemoryCase(task="mlp", rows=8, few=2, many=8)


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
    peaks = memory(GROWING, {"hand": hand, "graphs": keeping_graphs}, seed=0)
    assert growth(peaks, "hand") <= GROWING.tolerance
    assert growth(peaks, "graphs") > 1


def test_a_child_that_ends_early_is_an_error() -> None:
    assert child("this", ["--child", "bert"]) == []  # `import this` ends well but writes nothing
    assert child("benchmarks.no_such_module", ["--child", "bert"]) == [
        {"model": "bert", "error": "exit code 1"}
    ]


def test_the_picture_of_the_docs_is_that_of_the_history() -> None:
    drawn = history.draw(history.read(ROOT / history.FOLDER))
    assert (ROOT / history.PICTURE).read_text(encoding="utf-8") == drawn
