"""Steps that really run: bytes and seconds."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Plan, Step, Total
from anybatch.core.batch import Batch, SampleBatch, TensorBatch
from anybatch.core.errors import OutOfMemoryError, TraceError
from anybatch.planner.measure import measure_step, seconds_per_row, trace_update
from anybatch.planner.trace import trace
from tests.planner.test_trace import OPTIMIZERS, ROWS, mlp, vectors
from tests.snapshots import changes, snapshot


@pytest.mark.parametrize("micro_batch", [6, 12])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_probe_before_the_first_step_counts_the_state_to_come(name: str, micro_batch: int) -> None:
    model = mlp()
    step = Step(model, nn.CrossEntropyLoss(), OPTIMIZERS[name](model.parameters()), check=False)
    plan, batch = Plan(rows=ROWS, micro_batch=micro_batch), TensorBatch(vectors())
    measured, predicted = measure_step(plan, step.task(), batch), trace(plan, step.task(), batch)
    state = predicted.ledger.phases()["backward"].bytes[2]
    assert measured.ledger.phases()["backward"].bytes[2] == state > 0
    assert measured.ledger.phases()["backward"].total == predicted.ledger.phases()["backward"].total
    assert not step.optimizers[0].state


class Forgetful(nn.Module):
    """Writes to its own weight and to the rows that it is given, and takes a shape from values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        x.mul_(0.5)
        return self.layer(x) + x[: int((x[:, 0] > 0).sum())].sum() * 0


def test_weights_and_rows_that_a_forward_writes_to_are_as_before() -> None:
    model, (x, y) = Forgetful(), vectors()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    weight, rows = model.layer.weight.detach().clone(), x.clone()
    measure_step(Plan(rows=ROWS, micro_batch=6), step.task(), TensorBatch((x, y)))
    assert torch.equal(model.layer.weight, weight)
    assert torch.equal(x, rows)
    assert [one is model.layer.weight for one in step.effects.parameters] == [True]


class Greedy(Forgetful):
    """More than three rows are too many."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def test_rows_that_are_too_many_are_not_measured_in_parts() -> None:
    model = Greedy()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    before = model.layer.weight.detach().clone()
    batch = TensorBatch(vectors())
    assert measure_step(Plan(rows=ROWS, micro_batch=3), step.task(), batch).source == "measured"
    with pytest.raises(OutOfMemoryError, match="Expected 6 rows that can be measured, got out of memory"):
        measure_step(Plan(rows=ROWS, micro_batch=6), step.task(), batch)
    assert torch.equal(model.layer.weight, before)
    assert model.layer.weight.grad is None


# ---- optimizer


def make(**options: object) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    return Step(model, nn.MSELoss(), optimizer, check=False, **options)  # type: ignore[arg-type]


class Asking(torch.optim.SGD):
    """Wants a value that only a real step has."""

    def step(self, closure: object = None) -> None:
        1 / (self.param_groups[0]["params"][0].grad.max().item() - 1)


def test_an_update_that_cannot_be_traced_says_what_to_do() -> None:
    step = make()
    alone = Step(step.model, nn.MSELoss(), Asking(step.model.parameters(), lr=0.1), check=False)
    with pytest.raises(TraceError, match=r"an update .* ZeroDivisionError .*choose micro_batch= yourself"):
        trace_update(Plan(rows=2, micro_batch=2), alone.task(), set(), [])
    assert all(p.grad is None for p in step.model.parameters())


# ---- seconds


TIMED_ROWS = 8
PLANS = [Plan(rows=TIMED_ROWS, micro_batch=size) for size in (8, 4, 3)]
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
    "batch", [TensorBatch(torch.ones(TIMED_ROWS, 3)), SampleBatch([*torch.ones(TIMED_ROWS, 3)], views)]
)
def test_nothing_is_changed(batch: Batch) -> None:
    model = Restless()
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    before, judged = snapshot(step), {name: one.clone() for name, one in JUDGE.state_dict().items()}
    times = seconds_per_row(PLANS, step.task(), batch, limit_s=math.inf)
    assert all(one is not None and one > 0 for one in times)
    assert not changes(before, snapshot(step))
    assert all(torch.equal(one, judged[name]) for name, one in JUDGE.state_dict().items())
    assert all(parameter.grad is None for parameter in JUDGE.parameters())
    assert (model.seen, model.rows, model.state, float(model.plain.sum())) == ([0], 0, None, 0.0)
    assert all(bool((one == 1).all()) for one in batch.given)
