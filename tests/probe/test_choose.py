"""Rows that differ are chosen, and no more than there is time for."""

import time

import pytest
import torch

from anybatch.errors import BatchError
from anybatch.probe.choose import affordable, choose, rows_of, signatures, subset


def test_rows_that_differ_come_first() -> None:
    lengths = [5.0] * 10 + [1.0, 3.0]
    assert choose([[length] for length in lengths], 3) == [0, 10, 11]
    assert choose([[0.0]] * 4, 3) == [0, 1, 2]
    assert choose([[0.0]] * 2, 3) == [0, 1]


def test_signatures_tell_valid_targets_and_classes_apart() -> None:
    labels = torch.tensor([[1, 2, -100], [1, 2, 3], [1, 2, 3]])
    one, two, three = signatures({"x": torch.randn(3, 2), "y": labels}, None)
    assert one != two == three
    samples = [torch.arange(length) for length in (2, 3)]
    one, two = signatures(samples, lambda rows: rows[0][None])
    assert one != two


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


def test_slow_passes_mean_fewer_rows() -> None:
    assert affordable(lambda: time.sleep(0.02), 8, passes=10, budget_s=1e-3) == 3
    assert affordable(lambda: None, 8, passes=1, budget_s=60.0) == 8
