"""A trainer of a sharded model makes the run of one process, and its last whole checkpoint outlives kills."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from anybatch.core import CheckpointError
from anybatch.parallel import checkpoint
from tests.parallel import sharded_trainings
from tests.parallel.spawned import Ranks, spawned
from tests.parallel.test_trainer import FLOAT64, assert_alike


def assert_same(answers: list[Any]) -> None:
    assert len({one["bits"] for one in answers}) == 1


@pytest.mark.parametrize("kind", ["rows", "samples", "items", "few"])
def test_any_data_gives_the_run_of_one_process(two: Ranks, four: Ranks, kind: str) -> None:
    """Metrics, an early end, and micro-batches to evaluate on fewer than all ranks."""
    ranks = two if kind in ("rows", "samples") else four
    answers = ranks.run(sharded_trainings.trained, kind)
    assert_same(answers)
    assert_alike(answers[0], sharded_trainings.trained(0, 1, kind, True))


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """Four ranks of their own: a test makes their group anew, and torch keeps meshes of the old one."""
    with spawned(4) as ranks:
        yield ranks


@pytest.mark.parametrize("epochs", [2, 3], ids=["at the end of an epoch", "in the middle"])
def test_a_run_goes_on_on_any_number_of_ranks(fresh: Ranks, epochs: int, tmp_path: Path) -> None:
    """Saved by 4, loaded by 3 and by one process without shards: the same bits, and one end."""
    (done, *_) = fresh.run(sharded_trainings.saved, str(tmp_path / "run"), epochs)
    assert {one.name for one in (tmp_path / "run").iterdir()} == {
        "best",
        "log.jsonl",
        f"step-{done['counts'][1]:08}",
    }
    assert [one.name for one in (tmp_path / "run" / "best").iterdir()] == ["step-00000010"]
    ends = []
    for count in (3, 1):
        folder = shutil.copytree(tmp_path / "run", tmp_path / f"run{count}")
        found = fresh.run(sharded_trainings.resumed, str(folder), count, str(tmp_path), count == 1)[:count]
        for loaded, end in found:
            assert loaded["bits"] == done["bits"]
            assert loaded["counts"][:3] == done["counts"][:3]
            ends.append(end)
        if count == 1:
            continue
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [one["step"] for one in lines if one["event"] == "step"] == [*range(1, 21)]
    for end in ends[1:]:
        assert_alike(end, ends[0])
    weights = checkpoint.load(tmp_path / "run").model  # whole tensors, read from all files
    assert torch.cat([one.flatten() for one in weights.values()]).tolist() == done["weights"]


def test_a_sharded_run_goes_from_rank_to_rank(fresh: Ranks, tmp_path: Path) -> None:
    """Four ranks, then 3, one without shards, and 2, each in the middle of an epoch."""
    folder = str(tmp_path / "run")
    fresh.run(sharded_trainings.saved, folder, 3)
    for count, more in ((3, 1), (1, 2)):
        fresh.run(sharded_trainings.resumed, folder, count, str(tmp_path), count == 1, more)
    found = [end for _, end in fresh.run(sharded_trainings.resumed, folder, 2, str(tmp_path))[:2]]
    assert_same(found)
    alone = sharded_trainings.build(plain=True)
    end = sharded_trainings.numbers(alone, alone.fit(epochs=4))
    assert found[0]["counts"] == end["counts"]
    assert found[0]["weights"] == pytest.approx(end["weights"], abs=FLOAT64)


@pytest.mark.parametrize(
    ("place", "at", "left", "last"),
    [
        ("its shards are written", 1, 4, 3),
        ("before the rename", 0, 4, 3),
        ("an old one is deleted", 0, 3, 4),
    ],
)
def test_killed_while_saving_the_last_good_one_is_loaded(
    fresh: Ranks, place: str, at: int, left: int, last: int, tmp_path: Path
) -> None:
    """A rank gets SIGKILL in a save; 3 ranks and one process find the bits of the last whole checkpoint."""
    folder = tmp_path / "run"
    with spawned(2) as ranks:
        ranks.start(sharded_trainings.killed, str(folder), at, place, left)
        answers = ranks.answers(seconds=120.0)
    assert answers[at] == ("ended", -9)
    kind, (said, bits) = answers[1 - at]
    assert (kind, said[:35]) == ("value", "Expected an answer from all 2 ranks")
    for count in (3, 1):
        copy = shutil.copytree(folder, tmp_path / f"run{count}")
        args = str(copy), count, str(tmp_path), count == 1
        for loaded, end in fresh.run(sharded_trainings.resumed, *args)[:count]:
            assert loaded["counts"][1] == last
            assert loaded["bits"] == bits[last]
            assert end["counts"] == [4, 20, 20, ""]


CASES = {  # the error of rank 1 (or of rank 0, which writes), what the other is told, and the last save
    "callback": ("ValueError", "ValueError on rank 1", 3),
    "stop": ("", "", 3),
    "signal": ("SystemExit", "SystemExit on rank 1", 1),
    "data": ("ValueError", "ValueError on rank 1", 3),
    "forward": ("ValueError", "ValueError on rank 1", 1),
    "parameters": ("ValueError", "ValueError on rank 1", 2),
    "write": ("CheckpointError", "CheckpointError on rank 0", 0),
    "disk": (
        "CheckpointError",
        "rank-1.safetensors: expected a checkpoint that can be written and read, got",
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_one_rank_is_one_of_all(two: Ranks, case: str, tmp_path: Path) -> None:
    """No rank waits for the others, and what all have done is saved."""
    error, said, last = CASES[case]
    answers = two.run(sharded_trainings.failed, case, str(tmp_path / "run"))
    odd = case != "write"
    assert answers[odd]["error"] == error
    assert said in answers[not odd]["said"]
    if case == "disk":
        assert all("got on rank 1: No space left on device. Make room" in one["said"] for one in answers)
    for one in answers:
        assert one["saved"] == ([f"step-{last:08}"] if last else [])
        assert one["seconds"] < 15


@pytest.mark.slow
def test_an_error_in_a_validation_is_told_after_the_timeout() -> None:
    with spawned(2) as ranks:
        answers = ranks.run(sharded_trainings.failed, "metric", "", seconds=120.0)
    assert [one["error"] for one in answers] == ["RankError", "LossError"]
    assert "rank 1 (it says" in answers[0]["said"]


def test_what_is_refused_by_name(two: Ranks, tmp_path: Path) -> None:
    for told in two.run(sharded_trainings.refused, str(tmp_path / "run")):
        assert "Leave ab.EMA out" in told["averaged"]
        assert "expected a folder without an earlier run" in told["another run"]
        assert "seed 0 there and 1 here" in told["another seed"]
        assert "another's: 0.weight: float64 (6, 4) there, float64 (5, 4) here" in told["another model"]
        assert told["unchanged"] == "True"


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    trainer = sharded_trainings.build(plain=True)
    parts = {"model": trainer.step.model, "optimizers": trainer.step.optimizers}
    for step, given in ((8, 0), (9, 1), (9, 2), (9, 3), (7, 4)):
        checkpoint.save(tmp_path, step, progress={"given": given}, keep=2, **parts)
        assert checkpoint.load(tmp_path).progress == {"given": given}
        with (
            mock.patch.object(os, "replace", side_effect=OSError(28, "full")),
            pytest.raises(CheckpointError),
        ):
            checkpoint.save(tmp_path, step, keep=1, **parts)
        assert checkpoint.load(tmp_path).progress == {"given": given}
    assert [one.name for one in tmp_path.glob("step-*")] == ["step-00000007"]
