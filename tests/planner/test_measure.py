"""A step that is really run, and taken back. What cannot be traced at all is in tests/test_trace.py."""

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import OutOfMemoryError, PlanError
from anybatch.engine.plan import Plan
from anybatch.planner.measure import probe
from anybatch.planner.trace import trace
from tests.planner.test_trace import OPTIMIZERS, ROWS, mlp, task_of, vectors


@pytest.mark.parametrize("micro_batch", [6, 12])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_probe_before_the_first_step_counts_the_state_to_come(name: str, micro_batch: int) -> None:
    model = mlp()
    step = Step(model, nn.CrossEntropyLoss(), OPTIMIZERS[name](model.parameters()), check=False)
    plan, batch = Plan(rows=ROWS, micro_batch=micro_batch), TensorBatch(vectors())
    measured, predicted = probe(plan, task_of(step), batch), trace(plan, task_of(step), batch)
    state = predicted.ledger.phases()["backward"].bytes[2]
    assert measured.ledger.phases()["backward"].bytes[2] == state > 0
    assert measured.ledger.phases()["backward"].total == predicted.ledger.phases()["backward"].total
    assert not step.optimizers[0].state


class Forgetful(nn.Module):
    """Writes to its own weight, and takes a shape from values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return self.layer(x) + x[: int((x[:, 0] > 0).sum())].sum() * 0


def test_weights_that_a_forward_writes_to_are_as_before() -> None:
    model = Forgetful()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.layer.weight.detach().clone()
    probe(Plan(rows=ROWS, micro_batch=6), task_of(step), TensorBatch(vectors()))
    assert torch.equal(model.layer.weight, before)
    assert [one is model.layer.weight for one in step.guard.streams.written] == [True]


class Overwriting(nn.Module):
    """Writes to the rows that it is given, uses one of its layers only, and takes a shape from values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.layer(x) + x[: int((x[:, 0] > 0).sum())].sum() * 0


def test_rows_that_a_forward_writes_to_are_as_before() -> None:
    model = Overwriting()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    x, y = vectors()
    before = x.clone()
    probe(Plan(rows=ROWS, micro_batch=6), task_of(step), TensorBatch((x, y)))
    assert torch.equal(x, before)


def test_parameters_without_gradient_get_no_state() -> None:
    model = Overwriting()
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), check=False)
    found = probe(Plan(rows=ROWS, micro_batch=6), task_of(step), TensorBatch(vectors()))
    assert found.idle == {*model.idle.parameters()}
    count = 4 + 4  # bytes of the step counters of weight and bias
    numbers = sum(p.numel() for p in model.layer.parameters())
    assert found.ledger.phases()["backward"].bytes[2] == 2 * 4 * numbers + count


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(72, 10))
    step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    batch = TensorBatch((torch.randint(50, (ROWS, 9)), torch.randint(10, (ROWS,))))
    with pytest.raises(PlanError, match="dense"):
        probe(Plan(rows=ROWS, micro_batch=6), task_of(step), batch)
    assert all(p.grad is None for p in model.parameters())


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
    assert probe(Plan(rows=ROWS, micro_batch=3), task_of(step), batch).source == "measured"
    with pytest.raises(OutOfMemoryError, match="Expected 6 rows that can be measured, got out of memory"):
        probe(Plan(rows=ROWS, micro_batch=6), task_of(step), batch)
    assert torch.equal(model.layer.weight, before)
    assert model.layer.weight.grad is None
