"""A trainer on several ranks makes the run of one process, and no rank waits for one that failed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.parallel.checkpoint import load
from anybatch.testing import tolerance
from tests.parallel import trainings
from tests.parallel.spawned import Ranks, spawned

FLOAT64 = tolerance(torch.float64, 8)


def assert_alike(found: Any, expected: Any) -> None:
    """But for rounding."""
    assert found["counts"] == expected["counts"]
    for name in ("weights", "values"):
        assert found[name] == pytest.approx(expected[name], abs=FLOAT64, nan_ok=True), name


def assert_same(answers: list[Any]) -> None:
    """To the bit, on all ranks."""
    assert all(one == answers[0] for one in answers)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four ranks of this file: tests make their group anew, and torch keeps meshes of the old one."""
    with spawned(4) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", trainings.KINDS)
def test_any_data_gives_the_run_of_one_process(four: Ranks, kind: str) -> None:
    """Mutations: parts that overlap; a mean of means; a metric of rank 0's rows."""
    answers = four.run(trainings.trained, kind)
    assert_same(answers)
    alone = trainings.trained(0, 1, kind, "local")
    assert_alike(answers[0], alone)
    assert kind != "rows" or alone["counts"][-1], "no early end"


@pytest.mark.parametrize("kind", ["rows", "samples", "items", "few"])
def test_each_row_is_on_one_rank_in_the_order_of_one_process(four: Ranks, kind: str) -> None:
    alone = trainings.shares(0, 1, kind)
    parts = four.run(trainings.shares, kind)
    joined = [[row for part in batch for row in part] for batch in zip(*parts, strict=True)]
    assert joined == alone
    sizes = [[len(one) for one in batch] for batch in zip(*parts, strict=True)]
    assert sizes[-1] == ([1, 0, 0, 0] if kind == "few" else [2, 1, 1, 1])


@pytest.mark.parametrize("epochs", [2, 3], ids=["at the end of an epoch", "in the middle"])
def test_a_checkpoint_of_four_ranks_goes_on_on_any_number(four: Ranks, epochs: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert_same(four.run(trainings.saved, folder, None, epochs))
    alone = trainings.undisturbed(0, 1, strategy="local")
    for count in (1, 2, 3):
        answers = four.run(trainings.resumed, folder, count, str(tmp_path))[:count]
        assert_same([one["bits"] for one in answers])
        assert_same([one["values"] for one in answers])
        found = {**answers[0], "values": alone["values"][: -len(answers[0]["values"])] + answers[0]["values"]}
        assert_alike(found, alone)


def test_a_run_that_goes_from_rank_to_rank_makes_the_updates_of_one_process(
    four: Ranks, tmp_path: Path
) -> None:
    """Four ranks, then 3, 1 and 2, each in the middle of an epoch."""
    folder = str(tmp_path / "run")
    four.run(trainings.saved, folder, None, 3)
    for count, more in ((3, 1), (1, 2)):
        four.run(trainings.resumed, folder, count, str(tmp_path), None, more)
    found = four.run(trainings.resumed, folder, 2, str(tmp_path))[:2]
    assert_same([one["bits"] for one in found])
    alone = trainings.undisturbed(0, 1, strategy="local")
    assert found[0]["counts"] == alone["counts"]
    assert found[0]["weights"] == pytest.approx(alone["weights"], abs=FLOAT64)


def test_with_dropout_a_resumed_run_is_the_same_to_the_bit(four: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    four.run(trainings.saved, folder, nn.Dropout, 3)
    found = four.run(trainings.resumed, folder, 4, str(tmp_path), nn.Dropout)
    expected = four.run(trainings.undisturbed, nn.Dropout)
    assert_same([one["bits"] for one in found + expected])
    drawn = four.run(trainings.draws)
    assert len({tuple(one) for one in drawn}) == len(drawn)
    assert drawn[0] == trainings.draws(0, 1)  # rank 0 draws as one process does
    assert len({*drawn[1]}) == trainings.UPDATES


def test_rank_0_alone_writes(four: Ranks, tmp_path: Path) -> None:
    four.run(trainings.saved, str(tmp_path / "run"))
    names = ["best", "log.jsonl", f"step-{2 * trainings.UPDATES:08}"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [one for one in events if one != "step"] == ["start", "epoch", "epoch", "stop"]
    assert load(tmp_path / "run").progress["steps"] == 2 * trainings.UPDATES


CASES = {  # the error of the rank that is odd, what others say of it, and the updates made
    "other rows": ("BatchError", "DistributedSampler", 0),
    "fewer batches": ("RankError", "the end of epoch 1 after 2 batches", 2),
    "stops alone": ("RankError", "a stop in epoch 1 after 3 batches", 3),
    "callback fails": ("ValueError", "ValueError on rank 1", 3),
    "interrupted": ("KeyboardInterrupt", "KeyboardInterrupt on rank 1", 3),
    "metric fails": ("LossError", "LossError on rank 1", trainings.UPDATES),
    "cannot write": ("CheckpointError", "CheckpointError on rank 0", 3),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_one_rank_is_one_of_all(four: Ranks, case: str, tmp_path: Path) -> None:
    """Mutation: `abandon` is not called; then ranks wait until the timeout of the group."""
    kind, said, steps = CASES[case]
    answers = four.run(trainings.refused, case, str(tmp_path))
    odd = 0 if case == "cannot write" else 1
    assert answers[odd][0] == kind
    for number, (name, text, made) in enumerate(answers):
        assert made == steps
        if number != odd:
            assert name == (kind if case == "other rows" else "RankError")
            assert said in text


def test_buffers_that_differ_are_named_on_rank_0(four: Ranks) -> None:
    first, *others = four.run(trainings.warned, trainings.Seen)
    assert any("Buffers of Sequential differ between ranks" in one for one in first)
    assert not any("Buffers" in one for other in others for one in other)
