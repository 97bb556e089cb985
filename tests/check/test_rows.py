"""Rows: which ones a check runs on, on which axis they lie, how they are cut."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anybatch.check.rows import (
    Axis,
    Cut,
    Part,
    agree,
    choose,
    find_axis,
    is_close,
    rows_of,
    select,
    shorten,
    signatures,
    subset,
    take,
)
from anybatch.core.errors import BatchError

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


# ---- choose


def test_rows_that_differ_come_first() -> None:
    lengths = dict(enumerate([[5.0]] * 10 + [[1.0], [3.0]]))
    assert choose(lengths, 3) == [0, 10, 11]
    assert choose({row: [0.0] for row in range(4)}, 3) == [0, 1, 2]
    assert choose({row: [0.0] for row in (0, 7)}, 3) == [0, 7]


def test_signatures_tell_valid_targets_and_classes_apart() -> None:
    labels = torch.tensor([[1, 2, -100], [1, 2, 3], [1, 2, 3]])
    one, two, three = signatures({"x": torch.randn(3, 20), "y": labels}, None).values()
    assert one != two == three
    samples = [torch.arange(length) for length in (2, 3)]
    one, two = signatures(samples, lambda rows: rows[0][None]).values()
    assert one != two


def masked(rows: int) -> Tensor:
    mask = torch.ones(rows, 20)
    mask[40:43, 5:] = 0
    return mask


def unknown(rows: int) -> Tensor:
    target = torch.randn(rows, 20)
    target[40:43, 5:] = math.nan
    return target


def weighted(rows: int) -> Tensor:
    weight = torch.ones(rows)
    weight[40:43] = 5
    return weight


def late(rows: int) -> Tensor:
    return torch.arange(rows) // 200


@pytest.mark.parametrize("leaf", [masked, unknown, weighted, late])
def test_few_rows_that_differ_are_chosen_wherever_they_stand(leaf: Callable[[int], Tensor]) -> None:
    batch = torch.randn(300, 20), leaf(300)
    chosen = choose(signatures(batch, None), 4)
    assert {40, 41, 42} & set(chosen) if leaf is not late else max(chosen) >= 200


def test_samples_are_looked_at_from_the_first_to_the_last() -> None:
    table = signatures(list(range(1000)), lambda rows: torch.tensor([[row] for row in rows]))
    assert len(table) == 64
    assert max(table) > 900


def test_subset_is_of_its_own() -> None:
    x = torch.arange(4.0)
    part = subset((x, None), None, [3, 1])
    part[0].zero_()
    assert x.tolist() == [0, 1, 2, 3]
    assert subset(["a", "b", "c"], list, [2, 0]) == ["c", "a"]


def test_rows_are_counted_or_refused() -> None:
    assert rows_of(torch.zeros(3), None) == 3
    assert rows_of([1, 2], torch.tensor) == 2
    with pytest.raises(BatchError):
        rows_of((torch.zeros(3), torch.zeros(2)), None)


# ---- cut


BATCH = torch.arange(40.0).view(8, 5), torch.arange(8)


def cut(micro_batch: int) -> Cut:
    return Cut(data=BATCH, micro_batch=micro_batch, part=Part.whole(8))


def test_cut_says_its_parts_in_rows_and_words() -> None:
    assert [part.rows for part in cut(3).parts] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert (cut(3).words, cut(1).words) == ("3+3+2", "1 by 1")
    some = cut(3).only([6, 2])
    assert some.part == Part((6, 2), 8)
    assert some.data[0].equal(BATCH[0][[6, 2]])


def test_batch_is_of_its_own_and_in_the_dtype_that_is_asked_for() -> None:
    for dtype in (None, torch.float64):
        batch = cut(8).batch(dtype)
        x, y = next(iter(batch.cut(8)))
        assert (x.dtype, y.dtype) == (dtype or torch.float32, torch.int64)
        x.zero_()
    assert BATCH[0].any()


def test_samples_are_collated_part_by_part() -> None:
    samples = Cut(data=[1.0, 2.0, 3.0], micro_batch=2, part=Part.whole(3), collate=torch.tensor)
    found = list(samples.batch(torch.float64).cut(2))
    assert [micro.tolist() for micro in found] == [[1, 2], [3]]
    assert found[0].dtype == torch.float64
