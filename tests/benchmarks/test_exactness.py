"""Tests of the two errors: the hand-written loop has none, and those who err are found."""

import pytest

from benchmarks.config import FULL, RaceCase
from benchmarks.contestants import Entry, Update, hand
from benchmarks.exactness import exactness
from benchmarks.tasks import TASKS, Batch, split

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


def test_mean_of_means_is_exact_only_for_equal_weights() -> None:
    errors = exactness(CASE, {"hand": hand, "mean": mean_of_means}, seed=0)
    assert errors.gradient["hand"] <= FULL.gradient_error
    assert errors.gradient["mean"] > 0.05
    assert errors.parameters["mean"] <= FULL.parameter_error


def test_a_contestant_that_does_other_work_is_found() -> None:
    errors = exactness(CASE, {"hand": hand, "twice": twice}, seed=0)
    assert errors.parameters["twice"] > FULL.parameter_error


@pytest.mark.parametrize("name", TASKS)
def test_hand_written_loop_is_exact_on_every_task(name: str) -> None:
    case = RaceCase(name=name, task=name, rows=2, micro_batches=2, threshold=1.0)
    assert exactness(case, {"hand": hand}, seed=0).gradient["hand"] <= FULL.gradient_error
