"""The law of a fold, drawn: cut anywhere, merge in any order, the same result."""

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch import Fold, Total, weighted_mean

ITEMS = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), max_size=12)
Pair = tuple[int, int]


def as_total(item: Pair) -> Total:
    return Total(item[0], item[1])


def state(total: Total) -> Pair:
    return total.sum, total.weight  # type: ignore[return-value]


MEAN = weighted_mean(as_total)


def breaks_the_law(
    fold: Fold[Pair, Total, object], first: list[Pair], second: list[Pair], third: list[Pair]
) -> bool:
    """Whether a cut into three parts, or their order, changes the state."""
    whole = state(fold.collect([*first, *second, *third]))
    a, b, c = map(fold.collect, (first, second, third))
    ways = (
        fold.merge(fold.merge(a, b), c),
        fold.merge(a, fold.merge(b, c)),
        fold.merge(c, fold.merge(b, a)),
        fold.merge(fold.init(), fold.merge(fold.merge(a, b), c)),
        fold.merge(fold.merge(fold.merge(a, b), c), fold.init()),
    )
    return any(state(way) != whole for way in ways)


@given(ITEMS, ITEMS, ITEMS)
def test_mean_may_be_cut_anywhere(first: list[Pair], second: list[Pair], third: list[Pair]) -> None:
    assert not breaks_the_law(MEAN, first, second, third)


@pytest.mark.parametrize(
    "mutation",
    [
        {"merge": lambda a, b: Total((a.mean() + b.mean()) / 2, 1)},  # mean of means
        {"merge": lambda a, b: Total(a.sum - b.sum, a.weight + b.weight)},  # not commutative
        {"merge": lambda a, b: Total(a.sum + b.sum, max(a.weight, b.weight))},  # loses weight
        {"init": lambda: Total(1, 0)},  # no identity
        {"add": lambda total, item: as_total(item)},  # forgets
    ],
    ids=["mean of means", "minus", "largest weight", "init", "last item"],
)
def test_law_can_fail(mutation: dict[str, object]) -> None:
    mutant = dataclasses.replace(MEAN, **mutation)  # type: ignore[arg-type]
    assert breaks_the_law(mutant, [(3, 2), (5, 1)], [(7, 4)], [(1, 1)])


@given(ITEMS)
def test_mean_divides_once(items: list[Pair]) -> None:
    weight = sum(pair[1] for pair in items)
    mean = MEAN.run(items)
    if weight == 0:
        assert math.isnan(mean)
    else:
        assert mean == float(
            Fraction(sum(pair[0] for pair in items), weight)
        )  # correctly rounded: one division


def test_run_is_collect_and_finish() -> None:
    digits = Fold(init=str, add=lambda text, item: text + str(item), merge=lambda a, b: a + b, finish=int)
    assert digits.collect([1, 2]) == "12"
    assert digits.run(iter([1, 2, 3])) == 123
    assert digits.finish(digits.merge(digits.collect([1, 2]), digits.collect([3]))) == 123
