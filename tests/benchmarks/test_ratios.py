"""Tests of the ratio statistics."""

import random

import pytest

from benchmarks.ratios import paired_ratio


@pytest.mark.parametrize("count", [10, 25, 60])
def test_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(2000):
        ratio = paired_ratio([draw.lognormvariate(0.0, 0.3) for _ in range(count)], [1.0] * count)
        covered += ratio.low <= 1.0 <= ratio.high  # the true median of this distribution
    # At least 95 %, and not by being needlessly wide: the next narrower interval covers 93 % at most.
    assert 0.94 <= covered / 2000 <= 0.985


def test_pairs_cancel_what_slows_both() -> None:
    machine = [1.0, 1.1, 3.0, 1.2, 0.9, 2.5, 1.0]  # seconds of the same work, from moment to moment
    ratio = paired_ratio([1.02 * moment for moment in machine], machine)
    assert ratio.median == pytest.approx(1.02)
    assert ratio.width < 1e-9
    assert ratio.pairs == 7
