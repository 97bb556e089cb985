"""The integer program against trying everything."""

import itertools
import random

import pytest

from anybatch.compose import KEEP, Mix, Segment
from anybatch.solve import as_choice, fastest, smallest

POLICIES = (KEEP, "selective", "recompute")


def drawn(seed: int, blocks: int = 5) -> Mix:
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
            found.append(Segment(block=name, place=("forward", 0), net=net, peak=sizes[name] // 2 + net))
        found.append(Segment(block="", place=("loss", 0), net=0, peak=20_000_000_000, seconds=0.5))
        for name in reversed(names):
            net = -int(held[policy] * sizes[name])
            peak = int((1 - held[policy]) * sizes[name]) + sizes[name] // 3
            seconds = cost[policy] * sizes[name] / 1e10
            found.append(
                Segment(block=name, place=("backward", 0), net=net, peak=max(0, peak), seconds=seconds)
            )
        segments[policy] = found
    return Mix(start=draw.randint(0, 10**10), segments=segments)


def everything(mix: Mix) -> list[dict[str, str]]:
    tried = itertools.product(POLICIES, repeat=len(mix.blocks))
    return [{b: p for b, p in zip(mix.blocks, policies, strict=True) if p != KEEP} for policies in tried]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_fits_is_faster(seed: int, share: float) -> None:
    mix = drawn(seed)
    choices = everything(mix)
    peaks = [mix.peak(choice) for choice in choices]
    budget = int(min(peaks) + share * (mix.peak({}) - min(peaks)))
    best = min(mix.seconds(choice) for choice, peak in zip(choices, peaks, strict=True) if peak <= budget)
    found = fastest(mix, budget)
    assert found is not None
    assert mix.peak(found) <= budget
    assert mix.seconds(found) <= best * 1.01


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_smaller(seed: int) -> None:
    mix = drawn(seed)
    least = min(mix.peak(choice) for choice in everything(mix))
    assert mix.peak(smallest(mix)) <= least * 1.000001
    assert fastest(mix, least - least // 100) is None


def test_what_fits_is_kept() -> None:
    mix = drawn(0)
    assert fastest(mix, mix.peak({})) == {}


def test_without_blocks_there_is_nothing_to_choose() -> None:
    mix = Mix(start=3, segments={KEEP: [Segment(block="", place=("forward", 0), net=2, peak=4)]})
    assert smallest(mix) == {}
    assert (fastest(mix, 7), fastest(mix, 6)) == ({}, None)


def test_choice_keeps_the_order() -> None:
    assert as_choice({"b": "recompute", "a": "offload"}) == (("b", "recompute"), ("a", "offload"))
