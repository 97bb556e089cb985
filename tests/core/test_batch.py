"""A cut batch is the batch: every row once, in order, the ragged tail kept, nothing copied."""

import torch
from hypothesis import given, strategies as st

from anybatch.core.batch import SampleBatch, TensorBatch, cut_sizes


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
