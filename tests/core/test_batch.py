"""A cut batch is the batch: every row once, in order, the ragged tail kept, nothing copied."""

import torch
from hypothesis import given, strategies as st

from anybatch.core.batch import OpenBatch, SampleBatch, TensorBatch, cut_sizes


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


def test_only_a_range_is_a_batch_of_views() -> None:
    batch = TensorBatch({"x": torch.arange(5), "y": (torch.zeros(5, 2), None)}).only(range(2))
    assert batch.rows == 2
    assert batch.whole["x"].tolist() == [0, 1]
    assert batch.whole["y"][1] is None
    assert batch.whole["x"]._base is not None  # nothing is copied
    samples = SampleBatch([1, 2, 3], torch.tensor).only(range(2))
    assert [micro.tolist() for micro in samples.cut(1)] == [[1], [2]]
    assert OpenBatch().only(range(3)).rows == 0
