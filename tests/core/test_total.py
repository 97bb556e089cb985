"""Totals add up and divide once; the law of a fold, drawn: cut anywhere, merge in any order, the same."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from anybatch import Total
from anybatch.core import weighted_mean
from anybatch.core.errors import LossError


def pair(total: Total) -> tuple[float, float]:
    return float(total.sum), float(total.weight)


@pytest.mark.parametrize("make", [torch.tensor, float])
def test_totals_add_up_and_scale_by_their_sums(make: Any) -> None:
    a, b = Total(make(6.0), make(3.0)), Total(make(-1.0), make(2.0))
    assert pair(a + b) == pair(b + a) == pair(sum([a, b], Total.zero())) == (5.0, 5.0)
    assert pair(a + Total.zero()) == pair(Total.zero() + a) == (6.0, 3.0)
    assert pair(0.5 * a) == pair(a * 0.5) == (3.0, 3.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_kept_in_float32_or_wider(dtype: torch.dtype) -> None:
    half = Total(torch.tensor(60000.0, dtype=dtype), 1)
    assert half.sum.dtype == torch.float32
    assert pair(half + half)[0] == 2 * pair(half)[0] < math.inf
    assert Total(torch.tensor(1.0, dtype=torch.float64), 1).sum.dtype == torch.float64


@pytest.mark.parametrize(
    ("total", "weight", "got", "todo"),
    [
        (torch.zeros(3), 3, "got a tensor of shape (3,)", "Call .sum()"),
        ("1", 1, "got str", "Sum the losses"),
        (1.0, -1, "got -1", "A weight counts"),
        (1.0, math.nan, "got nan", "A weight counts"),
        (1.0, None, "got NoneType", "Count rows or valid tokens"),
        (1.0, torch.ones(3), "got shape (3,)", "Call .sum()"),
        (1.0, torch.ones((), requires_grad=True), "got 1.0", "use .detach()"),
    ],
)
def test_what_cannot_be_added_up_is_refused(total: Any, weight: Any, got: str, todo: str) -> None:
    with pytest.raises(LossError, match=rf"^Expected .*{re.escape(got)}.*{re.escape(todo)}"):
        Total(total, weight)


Pair = tuple[int, int]
ITEMS = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), max_size=12)
MEAN = weighted_mean(lambda item: Total(item[0], item[1]))


@given(ITEMS, ITEMS, ITEMS)
def test_mean_may_be_cut_anywhere(first: list[Pair], second: list[Pair], third: list[Pair]) -> None:
    whole = MEAN.collect([*first, *second, *third])
    a, b, c = map(MEAN.collect, (first, second, third))
    merge, none = MEAN.merge, MEAN.init()
    ways = merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a)), merge(none, whole)
    assert {(way.sum, way.weight) for way in (*ways, merge(whole, none))} == {(whole.sum, whole.weight)}
