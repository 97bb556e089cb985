"""Tests of the race: everyone does the same work, whatever the clock says."""

from benchmarks.config import Effort, RaceCase
from benchmarks.contestants import PEERS, Entry, Update, hand
from benchmarks.race import race
from benchmarks.results import Race

CASE = RaceCase(name="mlp", task="mlp", rows=2, micro_batches=3, threshold=1e9)
EFFORT = Effort(least_blocks=5, most_blocks=5, seconds=0.0, warm_up=1, peers_every=4, segment_s=0.0)
PEER = next(iter(PEERS))


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


def test_a_race_says_how_far_the_parameters_are_off() -> None:
    assert run().difference == 0
    assert run(anybatch=halved).difference > 1e-5
