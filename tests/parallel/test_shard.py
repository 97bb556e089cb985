"""Sharded models make the update of the whole batch in one process, whatever falls on which rank."""

import signal
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from tests.parallel import sharded, sharded_more
from tests.parallel.spawned import Ranks, spawned


def test_any_split_is_the_whole_batch(two: Ranks, four: Ranks) -> None:
    for ranks, seed, count in ((two, 0, 14), (four, 200, 8)):
        found = ranks.run(sharded.several, seed, count, seconds=120.0)
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize("name", sharded.MUTATIONS)
def test_mistakes_are_found(two: Ranks, name: str) -> None:
    assert sum(two.run(sharded.wrong, 0, 6, name))


def test_a_fault_is_recovered_from_together_or_ends_the_step_on_all_ranks(two: Ranks, four: Ranks) -> None:
    for ranks, seed, count in ((two, 0, 12), (four, 70, 6)):
        for told in zip(*ranks.run(sharded.all_faulted, seed, count, seconds=120.0), strict=True):
            at = told[0]["at"]
            assert len({bool(one["error"]) for one in told}) == 1, told
            for rank, one in enumerate(told):
                assert not one["error"] or rank == at or f"on rank {at}" in one["said"], told
                assert one["seconds"] < 10


def test_options(two: Ranks) -> None:
    for found in two.run(sharded_more.features):
        for name, error in found.items():
            assert error < (0.02 if "bf16" in name or "policy" in name else 1e-12), (name, error)


SAID = {
    "local": 'strategy="auto"',
    "replicate": 'strategy="auto"',
    "Shard": "without it",
    "parts": "on the model itself",
    "ignored": "out.bias",
    "meshes": "one mesh",
    "WholeBatch": "WholeBatch",
    "fp16-mixed": "fp16-mixed",
    "bf16-true": "bf16-true",
    "drop": "drop",
    "memory": "Leave out one of both",
    "micro_gradients": "micro_gradients",
    "callbacks": "callbacks",
    "hold": "the same hold",
    "terms": "one term",
    "FSDP1": "by fully_shard(model)",
    "state": "WindowError",
    "check": "before fully_shard",
    "plan": "before fully_shard",
    "flow": "before fully_shard",
    "Trainer": "anybatch.parallel.shard_files",
}


def test_what_is_refused_by_name(two: Ranks) -> None:
    for told in two.run(sharded_more.refused):
        for name, part in SAID.items():
            assert part in told[name], (name, told[name])


@pytest.mark.parametrize("hold", [False, True], ids=["reduced", "held"])
def test_collectives_of_a_step(two: Ranks, hold: bool) -> None:
    """Two blocks and the root: five gathers for each micro-batch; three sums each, or three in all."""
    (first, *others), _ = two.run(sharded_more.counts, hold)
    assert first == [2, 5, 3, 1]
    assert others == [[2, 5 * count, 3 if hold else 3 * count, 1] for count in (2, 3, 4, 4)]


def test_shards_over_half_of_the_ranks(four: Ranks) -> None:
    assert max(four.run(sharded_more.in_a_half)) < 1e-12


def test_a_checkpoint_is_loaded_by_any_number_of_ranks(four: Ranks, tmp_path: Path) -> None:
    found = four.run(sharded_more.resharded, str(tmp_path / "run"), seconds=120.0)
    first = found[0]
    assert len(first) == 4
    for before, after in pairwise(first):
        assert before["saved"] == after["loaded"]


def test_a_checkpoint_that_is_not_whole_is_never_loaded(two: Ranks, tmp_path: Path) -> None:
    for told in two.run(sharded_more.broken, str(tmp_path / "run"), seconds=120.0):
        assert "got none" in told["nothing"]
        assert "No space left" in told["full"]
        assert told["after full"] == (2, "")
        assert told["damaged"][0] == 1
        assert "blocks.1" in told["another model"]
        assert "expected optimizers ['AdamW']" in told["another optimizer"]


def test_a_fault_before_the_collectives_are_known_ends_all_ranks() -> None:
    with spawned(2) as ranks, mock.patch("tests.parallel.spawned.GROUP_TIMEOUT", 5):
        ranks.start(sharded.faulted, 62, True)
        answers = ranks.answers()
    told = [value for kind, value in answers if kind == "value"]
    assert [one["error"] for one in told] == ["RankError", "ValueError"], told
    assert "rank 1 (it says 'ValueError" in told[0]["said"]


def test_a_rank_that_ends_ends_all_with_everything_as_before() -> None:
    with spawned(2) as ranks:
        ranks.start(sharded.ended, signal.SIGKILL)
        (kind, found), (end, _) = ranks.answers()
    assert (kind, end) == ("value", "ended")
    assert "Expected an answer from all 2 ranks" in found[0]
    assert found[1]
