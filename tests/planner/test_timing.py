"""Tests of the short measured run: nothing is changed by it, whatever a model does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.core.batch import Batch, SampleBatch, TensorBatch
from anybatch.engine.plan import Plan
from anybatch.planner.measure import repeated, seconds_per_row
from tests.snapshots import changes, snapshot

ROWS = 8
PLANS = [Plan(rows=ROWS, micro_batch=size) for size in (8, 4, 3)]
JUDGE = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


class Restless(nn.Module):
    """Changes its input, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.plain = nn.Linear(3, 2), [0], torch.zeros(2)
        self.state: Tensor | None = None
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5)
        assert self.state is None or len(self.state) in (len(x), self.rows)
        self.rows += len(x)
        self.seen.append(len(x))
        self.plain += 1
        self.state = self.layer(x)
        return self.state


def loss(model: nn.Module, micro: Any) -> Total:
    outputs = JUDGE(model(micro))
    return Total(outputs.square().sum(), len(micro))


def views(samples: list[Tensor]) -> Tensor:
    return samples[0] if len(samples) == 1 else torch.stack(samples)


@pytest.mark.parametrize(
    "batch", [TensorBatch(torch.ones(ROWS, 3)), SampleBatch([*torch.ones(ROWS, 3)], views)]
)
def test_nothing_is_changed(batch: Batch) -> None:
    model = Restless()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    before, judged = snapshot(step), {name: one.clone() for name, one in JUDGE.state_dict().items()}
    times = seconds_per_row(PLANS, step.task(), batch, limit_s=1.0)
    assert all(one is not None and one > 0 for one in times)
    assert not changes(before, snapshot(step))
    assert all(torch.equal(one, judged[name]) for name, one in JUDGE.state_dict().items())
    assert all(parameter.grad is None for parameter in JUDGE.parameters())
    assert (model.seen, model.rows, model.state, float(model.plain.sum())) == ([0], 0, None, 0.0)
    assert all(bool((one == 1).all()) for one in batch.given)


def test_a_plan_that_fails_has_no_time() -> None:
    model = nn.Linear(3, 2)
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    batch = TensorBatch((torch.ones(ROWS, 3), torch.ones(ROWS, 2)))
    wrong = replace(PLANS[1], blocks=(("nowhere", "recompute"),))
    good, bad = seconds_per_row([PLANS[0], wrong], step.task(), batch, limit_s=1.0)
    assert good is not None
    assert bad is None


def test_rows_are_repeated_where_there_are_too_few() -> None:
    assert repeated(TensorBatch(torch.arange(3)), 5).whole.tolist() == [0, 1, 2, 0, 1]
    assert repeated(SampleBatch([1, 2], torch.tensor), 3).given == [1, 2, 1]
    assert repeated(TensorBatch(torch.arange(3)), 2).rows == 2
