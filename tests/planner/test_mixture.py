"""Bytes of a mixture are sums of those of pure steps."""

from dataclasses import replace
from math import inf

from anybatch.planner.mixture import KEEP, Mixture, Segment


def segment(block: str, net: int, peak: int, *, at: int = 0, seconds: float = 0.0) -> Segment:
    place = "forward", at
    return Segment(block=block, place=place, net=net, peak=peak, seconds=seconds, cheap=seconds / 2)


def test_peak_and_seconds_of_a_mixture() -> None:
    kept = [segment("a", 5, 6, seconds=1), segment("", 0, 3, seconds=1), segment("a", -5, 2, at=1, seconds=1)]
    rebuilt = [segment("a", 1, 6, seconds=1), segment("", 0, 9), segment("a", -1, 7, at=1, seconds=3)]
    mixture = Mixture(start=10, segments={KEEP: kept, "recompute": rebuilt})
    assert (mixture.blocks, mixture.policies) == (("a",), (KEEP, "recompute"))
    assert mixture.peak({}) == 10 + 5 + 3
    assert mixture.peak({"a": "recompute"}) == 10 + 1 + 7  # what belongs to no block is as in the kept step
    assert (mixture.seconds({}), mixture.seconds({"a": "recompute"})) == (3, 5)


def test_start_is_a_moment_too() -> None:
    assert Mixture(start=10, segments={KEEP: [segment("a", -5, 0)]}).peak({}) == 10


def test_bytes_are_freed_where_that_costs_least() -> None:
    first = [
        segment("dear", 10, 10, seconds=4.0),
        segment("twice", 5, 5, seconds=1.0),
        segment("twice", 5, 5, seconds=1.0),
        segment("empty", 0, 0, seconds=9.0),
        segment("", 7, 7, seconds=1.0),
    ]
    later = [
        replace(one, place=("forward", 1), seconds=3 * one.seconds, cheap=3 * one.cheap) for one in first
    ]
    back = [
        Segment(block=one, place=("backward", 0), net=-10, peak=0, seconds=3.0) for one in ("twice", "dear")
    ]
    mixture = Mixture(start=0, segments={KEEP: [*first, *back, *later[:-1]]})
    assert (mixture.peak({}), mixture.seconds({})) == (27, 67.0)
    found = [mixture.least_seconds(budget) - 67.0 for budget in (30, 27, 22, 17, 12, 7)]
    assert found == [0, 0, 2, 4, 8, 12]
    assert mixture.least_seconds(6) == inf
    assert mixture.least_seconds(7, may_move=True) == 67.0


def test_what_comes_and_goes_for_others_depends_on_their_policies() -> None:
    """Block a is moved: it goes while b computes, and is back before b's backward has done anything."""

    def step(moved: dict[str, bool]) -> list[Segment]:
        gone = {"a": -8} if moved["a"] else {}
        back = {"a": 8} if moved["a"] else {}
        return [
            segment("a", 10, 10),
            Segment(block="b", place=("forward", 0), net=10 - 8 * bool(gone), peak=12, others=gone),
            segment("", 0, 3),
            Segment(
                block="b",
                place=("backward", 0),
                net=-10 + 8 * bool(back),
                peak=4 + 8 * bool(back),
                others=back,
            ),
            Segment(block="a", place=("backward", 0), net=-10, peak=5),
        ]

    mixture = Mixture(start=0, segments={KEEP: step({"a": False}), "offload": step({"a": True})})
    found = {
        name: [(one.net, one.peak) for one in mixture.of(dict.fromkeys(name, "offload"))]
        for name in ("a", "b", "")
    }
    assert found["a"] == [(10, 10), (2, 12), (0, 3), (-2, 12), (-10, 5)]  # though b is kept
    assert found["b"] == found[""] == [(10, 10), (10, 12), (0, 3), (-10, 4), (-10, 5)]  # though b is moved
    assert (mixture.peak({}), mixture.peak({"a": "offload"}), mixture.peak({"b": "offload"})) == (24, 24, 24)


def test_a_policy_that_is_known_frees_bytes_at_its_own_price() -> None:
    def step(net: int, *seconds: float) -> list[Segment]:
        return [segment(block, net, 10, seconds=took) for block, took in zip("ab", seconds, strict=True)]

    kept = Mixture(start=0, segments={KEEP: step(10, 4.0, 4.0)})
    known = Mixture(start=0, segments={KEEP: step(10, 4.0, 4.0), "offload": step(0, 5.0, 9.0)})
    assert [kept.least_seconds(budget) for budget in (20, 10, 5)] == [8, 10, 11]
    assert [known.least_seconds(budget) for budget in (20, 10, 5)] == [8, 9, 10]
