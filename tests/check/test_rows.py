"""Rows in tensors: on whichever axis, flattened with others, packed, or cut short."""

import math

import pytest
import torch

from anybatch.check.rows import Axis, Part, agree, find_axis, is_close, select, shorten, take

PARTS = [Part((0, 1, 2), 8), Part((3, 4, 5), 8), Part((6, 7), 8)]


@pytest.mark.parametrize(
    ("whole", "piece", "axis"),
    [
        ((8, 5), (3, 5), Axis(0, 1)),
        ((5, 8, 2), (5, 3, 2), Axis(1, 1)),
        ((32, 8, 2), (12, 8, 2), Axis(0, 4)),  # rows times heads
        ((8, 8), (8, 8), None),  # belongs to no row
        ((8, 5), (2, 5), None),  # a row got lost
        ((8, 5), (3,), None),
    ],
)
def test_axis_of_rows(whole: tuple[int, ...], piece: tuple[int, ...], axis: Axis | None) -> None:
    assert find_axis(whole, piece, PARTS[0]) == axis


@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_taken_is_what_the_rows_have(place: int, per_row: int) -> None:
    rows = torch.arange(8 * 2 * per_row).view(8, per_row, 2)
    laid = rows.flatten(0, 1) if place == 0 else rows.flatten(0, 1).T
    for part in PARTS:
        mine = rows[list(part.rows)].flatten(0, 1)
        wanted = mine if place == 0 else mine.T
        taken = take(laid, wanted.shape, part)
        assert taken is not None
        assert taken.equal(wanted)
        assert select(laid, Axis(place, per_row), part).equal(wanted)


def test_longer_axes_are_cut_short_but_rows_are_not() -> None:
    whole = torch.arange(24).view(8, 3)
    taken = take(whole, (2, 1), PARTS[2])
    assert taken is not None
    assert taken.tolist() == [[18], [21]]
    assert take(whole, (1, 3), PARTS[2]) is None
    assert take(whole, (2, 4), PARTS[2]) is None
    assert shorten(whole, (8, 4)) is None


def test_agreement_of_rows_of_packed_tokens_and_of_neither() -> None:
    whole = torch.randn(8, 2)
    pieces = list(zip(whole.split([3, 3, 2]), PARTS, strict=True))
    assert agree(whole, pieces, 0.0) is True
    assert agree(whole + 1, pieces, 0.0) is False
    packed = torch.randn(11, 2)  # rows of different numbers of tokens
    pieces = list(zip(packed.split([4, 2, 5]), PARTS, strict=True))
    assert agree(packed, pieces, 0.0) is True
    assert agree(packed.flip(0), pieces, 0.0) is False
    assert agree(packed[:7], pieces, 0.0) is None


def test_closeness_minds_infinities_and_huge_fill_values() -> None:
    one = torch.tensor([1.0, math.inf, math.nan])
    assert is_close(one, one.clone(), 0.0)
    assert not is_close(one, torch.tensor([1.0, 2.0, math.nan]), 1.0)
    assert not is_close(torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0)
    assert not is_close(torch.ones(2), torch.ones(2) * 1.1, 0.01)
    huge = torch.tensor([torch.finfo(torch.float64).min, 0.0], dtype=torch.float64)
    assert is_close(huge, huge.clone(), 0.0)
