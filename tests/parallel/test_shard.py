"""Sharded models make the update of the whole batch in one process, whatever falls on which rank."""

import json
import signal
from itertools import pairwise
from pathlib import Path

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
    cases = (two, 0, 12, "tokens"), (four, 70, 6, "tokens"), (two, 2, 9, "whole"), (four, 100, 4, "whole")
    for ranks, *drawn in cases:
        for told in zip(*ranks.run(sharded.all_faulted, *drawn, seconds=120.0), strict=True):
            at = told[0]["at"]
            assert len({bool(one["error"]) for one in told}) == 1, told
            for rank, one in enumerate(told):
                assert not one["error"] or rank == at or f"on rank {at}" in one["said"], told
                assert one["seconds"] < 10


def test_a_whole_batch_loss_that_fails_on_one_rank_ends_its_first_step_on_all(two: Ranks) -> None:
    (first, error), (second, other) = two.run(sharded.function_fails)
    assert ("on rank 1, which says 'no" in first, second) == (True, "no")
    assert max(error, other) < 1e-12


def test_options(two: Ranks) -> None:
    for found in two.run(sharded_more.features):
        for name, error in found.items():
            assert error < (0.02 if "bf16" in name or "policy" in name else 1e-12), (name, error)


def test_rows_that_made_no_update_are_not_kept_for_micro_batches_of_weight_0(two: Ranks) -> None:
    assert two.run(sharded_more.poisoned) == [[False, True] * 2] * 2


def test_a_rank_that_fails_is_named_to_its_copies_but_not_later(four: Ranks) -> None:
    for rank, (first, then) in enumerate(four.run(sharded_more.named)):
        assert rank == 1 or "rank 1 (it says 'ValueError: no')" in first
        assert "ValueError" not in then


SAID = {
    "nested": "without other shards inside",
    "local": 'strategy="auto"',
    "replicate": 'strategy="auto"',
    "Shard": "without it",
    "parts": "on the model itself",
    "ignored": "out.bias",
    "meshes": "one mesh",
    "fp16-mixed": "fp16-mixed",
    "bf16-true": "bf16-true",
    "drop": "drop",
    "memory": "Leave out one of both",
    "micro_gradients": "micro_gradients",
    "callbacks": "callbacks",
    "hold": "the same hold",
    "terms": "one term",
    "FSDP1": "by fully_shard(model)",
    "check": "before fully_shard",
    "plan": "before fully_shard",
    "flow": "before fully_shard",
}


def test_what_is_refused_by_name(two: Ranks) -> None:
    for told in two.run(sharded_more.refused):
        for name, part in SAID.items():
            assert part in told[name], (name, told[name])


def test_ranks_may_differ_in_how_they_cut_but_in_nothing_that_changes_collectives(
    two: Ranks, four: Ranks
) -> None:
    own = {"micro_batch", "no micro_batch", "recompute"}
    for found in two.run(sharded_more.odd, [*sharded_more.ODD], seconds=120.0):
        for name, said in found.items():
            if name in own:
                assert isinstance(said, float), (name, said)
                assert said < 1e-12
            else:
                part = {"resharding": "sharding", "policy": "sharding", "modules": "sharding"}.get(name, "")
                part = part or ("model" if name == "trained" else "options")
                assert f"Expected the same {part} on all 2 ranks" in said, (name, said)
    assert ["over all 4 ranks" in said for said in four.run(sharded_more.left_out)] == [True] * 2 + [
        False
    ] * 2


@pytest.mark.parametrize("hold", [False, True], ids=["reduced", "held"])
def test_collectives_of_a_step(two: Ranks, hold: bool) -> None:
    """Two blocks and the root: five gathers for each micro-batch; three sums each, or three in all."""
    (first, *others), _ = two.run(sharded_more.counts, hold)
    assert first == [2, 5, 3, 1]
    assert others == [[2, 5 * count, 3 if hold else 3 * count, 1] for count in (2, 3, 4, 4)]


def test_laws_of_accumulation(four: Ranks) -> None:
    for found in four.run(sharded_more.accumulated, seconds=120.0):
        for name, error in found.items():
            assert isinstance(error, float), (name, error)
            assert error < 1e-12, (name, error)


@pytest.mark.parametrize("hold", [False, True], ids=["reduced", "held"])
def test_copies_are_added_up_once_per_step(four: Ranks, hold: bool) -> None:
    """Of two blocks and the root, with one sum for the norm; one, one and three micro-batches."""
    for found in four.run(sharded_more.sums_over_copies, hold):
        assert found == [[3, 4], [3, 4], [3 if hold else 9, 4]]


def test_shards_over_half_of_the_ranks(four: Ranks) -> None:
    assert max(four.run(sharded_more.in_a_half)) < 1e-12


def test_a_checkpoint_is_loaded_by_any_number_of_ranks(four: Ranks, tmp_path: Path) -> None:
    found = four.run(sharded_more.resharded, str(tmp_path / "run"), seconds=120.0)
    first = found[0]
    assert len(first) == 4
    for before, after in pairwise(first):
        assert before["saved"] == after["loaded"]


def test_checkpoints_of_any_layout_load_into_any_other(four: Ranks, tmp_path: Path) -> None:
    assert four.run(sharded_more.laid_out, str(tmp_path), seconds=120.0) == [[]] * 4
    slices = json.loads((tmp_path / "rows" / "step-00000001" / "checkpoint.json").read_text())["tensors"]
    files = [f"rank-{rank}.safetensors" for rank in range(4)]
    assert slices["model/0.bias"]["slices"] == [[files[at], 3 * at, 3 * at + 3] for at in range(4)]
    assert slices["model/1.bias"]["slices"] == [[files[at], 2 * at, 2 * at + 2] for at in range(3)]


def test_a_checkpoint_that_is_not_whole_is_never_loaded(two: Ranks, tmp_path: Path) -> None:
    for told in two.run(sharded_more.broken, str(tmp_path / "run"), seconds=120.0):
        assert "got no folder with one" in told["nothing"]
        assert "No space left" in told["full"]
        assert told["after full"] == (2, "")
        assert told["damaged"][0] == 1
        assert "blocks.1" in told["another model"]
        assert "optimizer 0: AdamW there, SGD here" in told["another optimizer"]


def test_a_fault_before_the_collectives_are_known_ends_all_ranks() -> None:
    with spawned(2) as ranks:
        ranks.start(sharded.faulted, 62, "tokens", True)
        answers = ranks.answers()
    told = [value for kind, value in answers if kind == "value"]
    assert [one["error"] for one in told] == ["RankError", "ValueError"], told
    assert "rank 1 (it says 'ValueError" in told[0]["said"]


@pytest.mark.parametrize(
    ("end", "size", "seed"),
    [(signal.SIGKILL, 2, 0), (signal.SIGSTOP, 2, 0), (signal.SIGSTOP, 3, 1), (signal.SIGSTOP, 3, 2)],
)
def test_a_rank_that_ends_or_stands_still_ends_all(end: signal.Signals, size: int, seed: int) -> None:
    with spawned(size) as ranks:
        sharded.assert_ended(ranks, end, seed)
