"""Tests of the law: exact where it extrapolates, and refused where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, WholeBatch
from anybatch.batch import TensorBatch
from anybatch.errors import TraceError
from anybatch.plan import Plan
from anybatch.predict import Law
from anybatch.trace import Trace, trace

Traced = Callable[..., Trace]


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 10))


def tracer(model: nn.Module, loss: Any = None, device: str | None = None, **options: Any) -> Traced:
    step = Step(model, loss or nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()))
    head = TensorBatch((torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long)))
    return lambda rows, micro_batch, run=None: trace(
        Plan(rows=rows, micro_batch=micro_batch, **options),
        step._task(),
        head,
        device=device,
        micro_batches=run,
    )


@pytest.mark.parametrize("device", [None, "cuda"])
def test_uncut_batches_are_extrapolated_to_the_byte(device: str | None) -> None:
    traced = tracer(conv(), device=device)
    law = Law.fit([traced(rows, rows) for rows in (2, 3, 5)])
    assert law.exact
    for rows in (1, 4, 7, 100, 10_000):
        assert law.peak(rows) == traced(rows, rows).peak
    assert law.ledger(100) == traced(100, 100).ledger


def test_the_peak_is_bent() -> None:
    """Flat where the optimizer decides, steep where activations do: a line through two points is wrong."""
    traced = tracer(conv())
    law = Law.fit([traced(rows, rows) for rows in (1, 2)])
    assert law.peak(2) - law.peak(1) < law.peak(1002) - law.peak(1001)


@pytest.mark.parametrize(("options", "run"), [({}, 3), ({"clip_norm": 1.0}, 3), ({"compensated": True}, 4)])
def test_cut_batches_are_extrapolated(options: dict[str, Any], run: int) -> None:
    traced = tracer(conv(), **options)
    for rows in (60, 1000, 100_000):
        law = Law.fit([traced(rows, size, run) for size in (1, 2, 4)])
        assert law.exact
        for micro_batch in (3, 5, 10):
            expected = traced(rows, micro_batch).peak  # with a ragged tail it is a few bytes less
            assert expected <= law.peak(micro_batch) <= expected + 8 * (rows % micro_batch > 0)


def test_a_law_reaches_batches_of_other_sizes() -> None:
    traced = tracer(conv())
    law = Law.fit([traced(3 * size, size) for size in (1, 2)])
    for micro_batch, rows in ((1, 5), (3, 30), (50, 1000)):
        assert law.peak(micro_batch, rows) == traced(rows, micro_batch).peak


def test_what_was_continued_already_makes_no_law() -> None:
    traced = tracer(conv())
    with pytest.raises(TraceError, match="micro_batches=3"):
        Law.fit([traced(100, size) for size in (1, 2)])


def test_largest_that_fits() -> None:
    traced = tracer(conv())
    law = Law.fit([traced(rows, rows) for rows in (1, 2)])
    budget = law.peak(37)
    assert law.largest_fitting(budget, 1000) == 37
    assert law.largest_fitting(budget - 1, 1000) == 36
    assert law.largest_fitting(budget, 20) == 20
    assert law.largest_fitting(law.peak(1) - 1, 1000) == 0


def test_a_bend_in_the_sizes_shows_at_a_third_trace() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            outputs = self.layer(x.flatten(1))
            return outputs + (outputs @ outputs.T).tanh().sum()

    traced = tracer(Squares())
    assert not Law.fit([traced(rows, rows) for rows in (50, 100, 200)]).exact


def test_one_size_is_no_law() -> None:
    traced = tracer(conv())
    with pytest.raises(TraceError, match="at least two sizes"):
        Law.fit([traced(2, 2), traced(4, 2)])


def test_steps_that_differ_have_no_law() -> None:
    traced = tracer(conv())
    with pytest.raises(TraceError, match="same step at 2 and 3 rows"):
        Law.fit([traced(2, 2), traced(9, 3)])


def test_a_loss_over_all_rows_is_not_continued() -> None:
    traced = tracer(conv(), WholeBatch(lambda outputs, target: outputs.square().mean()))
    law = Law.fit([traced(3 * size, size) for size in (1, 2)])
    assert law.peak(5, 15) == traced(15, 5).peak
    with pytest.raises(TraceError, match="got 4"):
        law.peak(5, 20)
