"""Tests of the race: everyone does the same work, whatever the clock says."""

from typing import Any

from benchmarks.config import Effort, RaceCase
from benchmarks.contestants import PEERS, Entry, Update, hand
from benchmarks.race import race
from benchmarks.results import Race
from benchmarks.tasks import Batch

CASE = RaceCase(name="mlp", task="mlp", rows=2, micro_batches=3, threshold=1e9)
EFFORT = Effort(least_blocks=5, most_blocks=5, seconds=0.0, warm_up=1, peers_every=4, segment_s=0.0)
PEER = next(iter(PEERS))


def counted(made: list[list[Batch]]) -> Any:
    def build(entry: Entry) -> Update:
        update, seen = hand(entry), []
        made.append(seen)
        return lambda batch: seen.append(batch) or update(batch)

    return build


def halved(entry: Entry) -> Update:
    for group in entry.optimizer.param_groups:
        group["lr"] /= 2
    return hand(entry)


def run(**builders: object) -> Race:
    return race(CASE, EFFORT, {"hand": hand, "anybatch": hand} | builders, seconds=0.0, seed=0)


def test_every_block_is_a_pair_and_peers_join_some() -> None:
    result = run(**{PEER: hand})
    assert result.blocks == {"hand": [0, 1, 2, 3, 4], "anybatch": [0, 1, 2, 3, 4], PEER: [0, 4]}
    assert {name: len(seconds) for name, seconds in result.cpu.items()} == {"hand": 5, "anybatch": 5, PEER: 2}


def test_everyone_makes_the_same_number_of_updates() -> None:
    made: list[list[Batch]] = []
    run(hand=counted(made), anybatch=counted(made))
    assert [*map(len, made)] == [2 + 2 * 5, 2 + 2 * 5]  # warm-up, and two a block


def test_a_race_says_how_far_the_parameters_are_off() -> None:
    assert run().difference == 0
    assert run(anybatch=halved).difference > 1e-5
