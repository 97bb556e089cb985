"""Shapes of rows: rounded up, read off samples, and made into a batch to be traced."""

import pytest
import torch

from anybatch.core.batch import SampleBatch, TensorBatch
from anybatch.core.errors import BatchError
from anybatch.planner.cache import longest, round_up, row_shape, shaped


def test_sizes_are_rounded_up_in_steps_of_a_quarter_at_most() -> None:
    for size in range(1, 2000):
        assert size <= round_up(size) <= max(size * 5 // 4, 1)
        assert round_up(round_up(size)) == round_up(size)
    assert len({round_up(size) for size in range(65, 129)}) == 4


def test_rows_of_another_shape() -> None:
    found = shaped(
        (("torch.float32", (9, 3)), ("torch.int64", ())), TensorBatch((torch.zeros(4, 2, 3), torch.arange(4)))
    )
    x, y = found.whole
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((1, 9, 3), (1,), torch.float32, torch.int64)
    assert x.device.type == y.device.type == "cpu"


def test_samples_of_other_kinds_are_refused() -> None:
    batch = SampleBatch([0] * 9, lambda rows: torch.zeros([1] * len(rows)))
    with pytest.raises(BatchError, match="tensors of the same kinds"):
        longest(batch)


def test_shape_of_a_row() -> None:
    assert row_shape({"x": torch.zeros(4, 2, 3), "y": torch.arange(4)}) == (
        ("torch.float32", (2, 3)),
        ("torch.int64", ()),
    )
