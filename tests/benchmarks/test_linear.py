"""Tests of the head's measures: the peak in blocks is exact, and a loss that is wrong is found."""

from benchmarks.config import HeadCase
from benchmarks.linear import head

CASE = HeadCase(vocabulary=20_000, tokens=1_000, width=8, pairs=2)


def test_blocks_hold_a_block() -> None:
    result = head(CASE, seed=0)
    logits, weight = 4 * 20_000 * 1_000, 4 * 20_000 * 8
    assert result.held == weight + 4 * 1_000 * 8
    assert 3 * logits < result.peak["hand"] < 3 * logits + 4 * weight
    block = 4 * 20_000 * 384  # the most whole tiles of 64 rows in 32 MiB
    assert block < result.peak["anybatch"] < block + 4 * weight
    assert {name: len(seconds) for name, seconds in result.wall.items()} == {"hand": 2, "anybatch": 2}
    assert max(result.error.values()) <= CASE.error
