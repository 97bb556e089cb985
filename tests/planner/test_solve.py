"""The greedy choice against trying everything."""

import itertools
import random
from statistics import median

import pytest

from anybatch.planner.mixture import KEEP, Mixture, Segment, fastest, smallest

POLICIES = (KEEP, "selective", "recompute")
MEDIAN, WORST = 1.01, 1.08  # times the fastest of all


def drawn(seed: int, blocks: int = 5) -> Mixture:
    """A step like those that there are: forwards, a loss, backwards in the other order, with noise."""
    draw = random.Random(seed)
    names = [f"block{index}" for index in range(blocks)]
    sizes = {name: draw.randint(10_000, 90_000_000_000) for name in names}
    held = {KEEP: 1.0, "selective": 0.5, "recompute": 0.1}
    cost = {KEEP: 0.0, "selective": draw.uniform(0.05, 0.5), "recompute": 1.0}
    segments: dict[str, list[Segment]] = {}
    for policy in POLICIES:
        found: list[Segment] = []
        for name in names:
            net = int(held[policy] * sizes[name])
            peak, seconds = sizes[name] // 2 + net, sizes[name] / 1e10
            found.append(Segment(block=name, place=("forward", 0), net=net, peak=peak, seconds=seconds))
        found.append(Segment(block="", place=("loss", 0), net=0, peak=20_000_000_000, seconds=0.5))
        for name in reversed(names):
            net = -int(held[policy] * sizes[name])
            peak = int((1 - held[policy]) * sizes[name]) + sizes[name] // 3
            seconds = (2 + cost[policy]) * sizes[name] / 1e10
            found.append(
                Segment(block=name, place=("backward", 0), net=net, peak=max(0, peak), seconds=seconds)
            )
        segments[policy] = found
    return Mixture(start=draw.randint(0, 10**10), segments=segments)


def everything(mixture: Mixture) -> list[dict[str, str]]:
    tried = itertools.product(mixture.policies, repeat=len(mixture.blocks))
    return [{b: p for b, p in zip(mixture.blocks, policies, strict=True) if p != KEEP} for policies in tried]


def test_hardly_anything_that_fits_is_faster() -> None:
    ratios: list[float] = []
    for seed in range(6):
        mixture = drawn(seed)
        choices = everything(mixture)
        peaks = [mixture.peak(choice) for choice in choices]
        for share in (0.0, 0.1, 0.4, 0.7, 0.95):
            budget = int(min(peaks) + share * (mixture.peak({}) - min(peaks)))
            fitting = [choice for choice, peak in zip(choices, peaks, strict=True) if peak <= budget]
            found = fastest(mixture, budget)
            assert found is not None
            assert mixture.peak(found) <= budget
            ratios.append(mixture.seconds(found) / min(mixture.seconds(choice) for choice in fitting))
    assert median(ratios) < MEDIAN
    assert max(ratios) < WORST


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_smaller(seed: int) -> None:
    mixture = drawn(seed)
    least = min(mixture.peak(choice) for choice in everything(mixture))
    assert mixture.peak(smallest(mixture)) <= least * 1.000001
    assert fastest(mixture, least - least // 100) is None
    assert fastest(mixture, mixture.peak({})) == {}  # what fits is kept
