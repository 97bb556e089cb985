"""The law of a fold, drawn: cut anywhere, merge in any order, the same result; and one division."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from anybatch import Fold, Total, weighted_mean

Pair = tuple[int, int]
ITEMS = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), max_size=12)
MEAN = weighted_mean(lambda item: Total(item[0], item[1]))


@given(ITEMS, ITEMS, ITEMS)
def test_mean_may_be_cut_anywhere(first: list[Pair], second: list[Pair], third: list[Pair]) -> None:
    whole = MEAN.collect([*first, *second, *third])
    a, b, c = map(MEAN.collect, (first, second, third))
    merge = MEAN.merge
    for way in (
        merge(merge(a, b), c),
        merge(a, merge(b, c)),
        merge(c, merge(b, a)),
        merge(MEAN.init(), whole),
        merge(whole, MEAN.init()),
    ):
        assert (way.sum, way.weight) == (whole.sum, whole.weight)


@given(ITEMS)
def test_mean_divides_once(items: list[Pair]) -> None:
    total, weight = (sum(column) for column in zip((0, 0), *items, strict=True))
    mean = MEAN.run(items)
    if weight == 0:
        assert math.isnan(mean)
    else:
        assert mean == float(Fraction(total, weight))  # correctly rounded: one division


def test_run_is_collect_and_finish() -> None:
    digits = Fold(init=str, add=lambda text, item: text + str(item), merge=lambda a, b: a + b, finish=int)
    assert digits.collect([1, 2]) == "12"
    assert digits.run(iter([1, 2, 3])) == 123
    assert digits.finish(digits.merge(digits.collect([1, 2]), digits.collect([3]))) == 123
