"""Rows that differ are chosen, and no more than there is time for."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anybatch.check.rows import choose, rows_of, signatures, subset
from anybatch.core.errors import BatchError


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
