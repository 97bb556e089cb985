"""A cut batch is the batch: every row once, in order, the ragged tail kept, nothing copied."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.batch import OpenBatch, SampleBatch, TensorBatch, cut_sizes
from anybatch.core.errors import BatchError


@given(st.integers(1, 200), st.integers(1, 250))
def test_sizes_add_up_and_only_the_last_is_short(rows: int, micro_batch: int) -> None:
    sizes = cut_sizes(rows, micro_batch)
    assert sum(sizes) == rows
    assert set(sizes[:-1]) <= {micro_batch}
    assert 1 <= sizes[-1] <= micro_batch


@given(st.integers(1, 30), st.integers(1, 35))
def test_tensor_and_sample_batches_cut_alike(rows: int, micro_batch: int) -> None:
    x, y = torch.arange(rows), torch.arange(2.0 * rows).reshape(rows, 2)
    tensors = TensorBatch({"x": x, "y": [y, None]})
    samples = SampleBatch(list(range(rows)), torch.tensor)
    assert tensors.rows == samples.rows == rows
    parts = list(tensors.cut(micro_batch))
    assert [len(part["x"]) for part in parts] == cut_sizes(rows, micro_batch)
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), y)
    assert all(part["y"][1] is None for part in parts)
    for one, other in zip(parts, samples.cut(micro_batch), strict=True):
        assert torch.equal(one["x"], other)


def test_micro_batches_are_views() -> None:
    x = torch.arange(10)
    parts = list(TensorBatch(x).cut(4))
    assert [part.data_ptr() - x.data_ptr() for part in parts] == [0, 32, 64]


@pytest.mark.parametrize("micro_batch", [4, 5])
def test_uncut_batch_is_the_very_value(micro_batch: int) -> None:
    value = (torch.zeros(4), [torch.ones(4)])
    (only,) = TensorBatch(value).cut(micro_batch)
    assert only is value


def test_what_was_given_is_kept() -> None:
    value, samples = (torch.zeros(4),), [1, 2]
    tensors, collated = TensorBatch(value), SampleBatch(samples, torch.tensor)
    assert tensors.given is tensors.whole is value
    assert tensors.leaves[0] is value[0]
    assert collated.given is samples
    assert collated.whole is None


def test_samples_are_collated_one_micro_batch_at_a_time() -> None:
    collated: list[list[int]] = []

    def collate(samples: list[int]) -> Any:
        collated.append(samples)
        return torch.tensor(samples)

    cut = SampleBatch(range(5), collate).cut(2)
    assert collated == []
    assert next(cut).tolist() == [0, 1]
    assert collated == [[0, 1]]
    assert [part.tolist() for part in cut] == [[2, 3], [4]]


def test_open_batch_knows_nothing() -> None:
    batch = OpenBatch()
    assert (batch.rows, batch.given, batch.whole, list(batch.cut(1))) == (0, None, None, [])


@pytest.mark.parametrize(
    ("value", "got", "todo"),
    [
        ((), "got 0", "Pass the tensors of all rows"),
        ({"x": None}, "got 0", "Pass the tensors of all rows"),
        (torch.zeros(0, 3), "got an empty batch: the batch itself: (0, 3)", "Skip empty batches"),
        ((torch.zeros(0), torch.zeros(0, 2)), "empty batch: [0]: (0,), [1]: (0, 2)", "Skip empty batches"),
        ((torch.zeros(4), torch.zeros(3)), "got [0]: (4,), [1]: (3,)", "one entry per row"),
        ((torch.zeros(4), torch.zeros(0)), "got [0]: (4,), [1]: (0,)", "one entry per row"),
        (
            {"x": torch.zeros(4), "scale": torch.tensor(2.0)},
            "['scale']: ()",
            "what all rows share belongs in",
        ),
        (torch.tensor(1.0), "got the batch itself: ()", "one entry per row"),
    ],
)
def test_tensors_that_cannot_be_cut_are_refused(value: Any, got: str, todo: str) -> None:
    with pytest.raises(BatchError, match=r"^Expected ") as caught:
        TensorBatch(value)
    assert got in str(caught.value)
    assert todo in str(caught.value)


def test_of_many_tensors_only_those_that_disagree_are_shown() -> None:
    value = {f"x{index}": torch.zeros(4) for index in range(20)} | {"scale": torch.tensor(2.0)}
    with pytest.raises(BatchError) as caught:
        TensorBatch(value)
    assert "got ['x0']: (4,), ['scale']: (), … and 19 more. Give" in str(caught.value)
    with pytest.raises(BatchError, match=r"an empty batch: \[0\]: \(0,\), … and 4 more\. Skip"):
        TensorBatch([torch.zeros(0)] * 5)


SAMPLES = {
    "pairs": [(torch.zeros(8), torch.tensor(1))] * 4096,
    "mappings": [{"x": torch.zeros(8), "y": torch.tensor(1)}] * 4096,
    "rows of several lengths": [torch.zeros(1 + index % 7) for index in range(4096)],
    "few": [(torch.zeros(8), torch.tensor(1))],
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_a_list_of_samples_is_told_of_collate_in_few_words(samples: Any) -> None:
    with pytest.raises(BatchError, match="A list of samples needs collate=") as caught:
        TensorBatch(samples)
    assert len(str(caught.value)) < 400
    for micro in SampleBatch(samples, lambda some: torch.tensor(len(some))).cut(4096):
        assert micro == len(samples)  # with it, it is a batch


@pytest.mark.parametrize("value", [[torch.zeros(4), torch.zeros(3)], (torch.zeros(4), torch.tensor(1))])
def test_inputs_and_targets_are_no_samples(value: Any) -> None:
    with pytest.raises(BatchError) as caught:
        TensorBatch(value)
    assert "collate" not in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "got"),
    [
        ([], "got []"),
        (torch.zeros(4), "got Tensor"),
        ({"x": torch.zeros(4)}, "got dict"),
        (iter([1, 2]), "got list_iterator"),
        ({1, 2}, "got set"),
        (7, "got int"),
    ],
)
def test_samples_that_cannot_be_cut_are_refused(samples: Any, got: str) -> None:
    with pytest.raises(BatchError, match=r"^Expected (a list of samples|at least one sample)") as caught:
        SampleBatch(samples, torch.tensor)
    assert got in str(caught.value)


def test_head_is_a_batch_of_the_first_rows() -> None:
    batch = TensorBatch({"x": torch.arange(5), "y": (torch.zeros(5, 2), None)}).head(2)
    assert batch.rows == 2
    assert batch.whole["x"].tolist() == [0, 1]
    assert batch.whole["y"][1] is None
    assert [micro.tolist() for micro in SampleBatch([1, 2, 3], torch.tensor).head(2).cut(1)] == [[1], [2]]
    assert SampleBatch([1, 2, 3], torch.tensor).head(9).rows == 3
    assert OpenBatch().head(3).rows == 0
