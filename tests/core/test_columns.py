"""A cut batch is the batch: each row once, in order, also of lists with an entry for each row."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from anybatch import BatchLoss, Options, Step, Total
from anybatch.core import batch_of
from anybatch.core.batch import SampleBatch, TensorBatch, cut_sizes
from anybatch.parallel import ParameterServer
from anybatch.testing import relative_error
from tests.parallel.inline import Inline

ROWS = 6
EXACT = 1e-12


def boxes(counts: tuple[int, ...] = (2, 0, 1, 3, 1, 2)) -> list[dict[str, Tensor]]:
    each = [torch.linspace(0, 1, 4 * n, dtype=torch.float64).view(n, 4) for n in counts]
    return [{"boxes": one, "class": torch.arange(len(one)) % 3} for one in each]


def images(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


LOOSE = [torch.ones(2 + row, 8, dtype=torch.float64) * row for row in range(ROWS)]  # of several heights
Y = torch.zeros(ROWS, 1)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        ((images(), boxes()), [2, 2, 2]),
        ((tuple(LOOSE), tuple(boxes())), [2, 2, 2]),  # as detection's collate gives them
        ({"pixel_values": images(), "labels": boxes()}, [2, 2, 2]),
        ({"x": images(), "names": [*"abcdef"], "y": Y}, [2, 2, 2]),
        ((images(), [boxes((6,) * 6)]), [1, 1, 1]),  # deep inside
        (([torch.ones(3, 4, 4)] * 2, boxes((3, 3))), [2]),  # three colours, three boxes
    ],
)
def test_a_column_is_cut_with_the_rows(batch: Any, wanted: list[int]) -> None:
    columns = lambda one: [*one.values()] if isinstance(one, dict) else one  # noqa: E731
    found = batch_of(batch)
    parts = list(found.cut(2))
    assert {type(micro) for micro in parts} == {type(batch)}
    assert [len(columns(micro)[1]) for micro in parts] == wanted
    (whole,) = found.cut(found.rows)
    assert all(torch.equal(*pair) for pair in zip(columns(whole)[0], columns(batch)[0], strict=True))


@pytest.mark.parametrize(
    "batch",
    [
        (images(), [Y, Y]),  # several targets
        (images(), [{"a": Y}, {"a": Y}]),  # a pair of what all rows have
        (images(), [{"a": Y}, {"b": Y}, {"c": Y}, {"d": Y}, {"e": Y}, {"f": Y}]),
        ([Y, Y], [Y, Y]),
    ],
)
def test_tensors_of_all_rows_in_a_list_are_no_column(batch: Any) -> None:
    assert type(batch_of(batch)).__name__ == "TensorBatch"


def detection(model: nn.Module, micro: Any) -> Total:
    found = model(micro[0])
    each = [((one[None] - label["boxes"]) ** 2).sum() for one, label in zip(found, micro[1], strict=True)]
    return Total(torch.stack(each).sum(), sum(len(label["boxes"]) for label in micro[1]))


def gradient(how: str, size: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 4, dtype=torch.float64), (images(), boxes())
    if how in ("loop", "batch_loss"):
        door = BatchLoss(model, detection, micro_batch=size) if how == "batch_loss" else None
        (door(batch) if door else detection(model, batch).mean()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in model.parameters()]
    options = {"memory": "1GiB"} if how == "memory" else {"micro_batch": size}
    servers = ParameterServer(servers=2, workers=2, cluster=Inline()) if how == "server" else "auto"
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = Step(model, detection, optimizer, options=Options(check="always", strategy=servers), **options)
    if how == "window":
        with step.window() as window:
            for start in range(0, ROWS, size):
                window.add((batch[0][start : start + size], batch[1][start : start + size]))
    else:
        assert step(batch).rows == ROWS
    return [one - p.detach() for one, p in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("size", [1, 2, 4, 6])
@pytest.mark.parametrize("how", ["step", "window", "batch_loss", "memory", "server"])
def test_a_detector_is_trained_exactly_through_every_door(how: str, size: int) -> None:
    assert relative_error(gradient(how, size), gradient("loop", size)) <= EXACT


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
