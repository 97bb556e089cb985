"""A cut batch is the batch: every row once, in order, the ragged tail kept, nothing copied."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from anybatch.core.batch import OpenBatch, SampleBatch, TensorBatch, cut_sizes
from anybatch.core.errors import BatchError


@given(st.integers(1, 30), st.integers(1, 35))
def test_tensor_and_sample_batches_cut_alike(rows: int, micro_batch: int) -> None:
    x, y = torch.arange(rows), torch.arange(2.0 * rows).reshape(rows, 2)
    tensors = TensorBatch({"x": x, "y": [y, None]})
    samples = SampleBatch(list(range(rows)), torch.tensor)
    assert tensors.rows == samples.rows == rows
    parts = list(tensors.cut(micro_batch))
    sizes = [len(part["x"]) for part in parts]
    assert sizes == cut_sizes(rows, micro_batch)
    assert set(sizes[:-1]) <= {micro_batch}
    assert 1 <= sizes[-1] <= micro_batch
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), y)
    assert all(part["y"][1] is None for part in parts)
    for one, other in zip(parts, samples.cut(micro_batch), strict=True):
        assert torch.equal(one["x"], other)


@pytest.mark.parametrize("micro_batch", [4, 5])
def test_uncut_batch_is_the_very_value_and_cut_it_is_views(micro_batch: int) -> None:
    value = (torch.arange(4), [torch.ones(4)])
    batch = TensorBatch(value)
    (only,) = batch.cut(micro_batch)
    assert only is batch.given is batch.whole is value
    parts = [part[0].data_ptr() - value[0].data_ptr() for part in batch.cut(3)]
    assert parts == [0, 24]


def test_samples_are_collated_one_micro_batch_at_a_time() -> None:
    collated: list[list[int]] = []
    cut = SampleBatch(range(5), lambda samples: collated.append(samples) or samples).cut(2)
    assert collated == []
    assert next(cut) == [0, 1]
    assert collated == [[0, 1]]
    assert list(cut) == [[2, 3], [4]]


@pytest.mark.parametrize(
    ("value", "got", "todo"),
    [
        (torch.tensor(1.0), "got the batch itself: ()", "one entry per row"),
        ([(torch.zeros(8), torch.tensor(1))] * 4096, "and 8,", "A list of samples needs collate="),
        ([torch.zeros(0)] * 5, "an empty batch: [0]: (0,), … and 4 more", "Skip empty"),
    ],
)
def test_tensors_that_cannot_be_cut_are_refused(value: Any, got: str, todo: str) -> None:
    with pytest.raises(BatchError, match=rf"^Expected .*{re.escape(got)}.*{re.escape(todo)}") as caught:
        TensorBatch(value)
    assert len(str(caught.value)) < 450


def test_only_a_range_is_a_batch_of_views() -> None:
    batch = TensorBatch({"x": torch.arange(5), "y": (torch.zeros(5, 2), None)}).only(range(2))
    assert batch.rows == 2
    assert batch.whole["x"].tolist() == [0, 1]
    assert batch.whole["y"][1] is None
    assert batch.whole["x"]._base is not None  # nothing is copied
    samples = SampleBatch([1, 2, 3], torch.tensor).only(range(2))
    assert [micro.tolist() for micro in samples.cut(1)] == [[1], [2]]
    assert OpenBatch().only(range(3)).rows == 0
