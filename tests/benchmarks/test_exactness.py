"""The hand-written loop and ours have no error, those who err are found; peers only where installed."""

from benchmarks.config import FULL, RaceCase
from benchmarks.contestants import Entry, Update, hand
from benchmarks.exactness import exactness
from benchmarks.tasks import Batch, split

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
