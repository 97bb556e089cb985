"""Forwards that write to parameters or to their rows, and reentrant checkpoints of the caller's own."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch import AnybatchError, Options, Precision, Step
from anybatch.core.errors import OutOfMemoryError
from anybatch.engine import admit, carry_out
from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import scarce_in_passes, take
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot
from tests.zoo import Made, momentum

ROWS = 16


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def bounded() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(32, 4))


def make(make_model: Any, steps: int = 0) -> tuple[Step, Any]:
    """A step after some updates, and its batch."""
    torch.manual_seed(0)
    model = make_model()
    x = torch.randint(20, (ROWS, 4)) if make_model is bounded else torch.randn(ROWS, 6)
    batch = x, torch.randint(4, (ROWS,))
    step = Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=4, options=Options(check=False))
    for _ in range(steps):
        step(batch)
    return step, batch


WRITING = [(bounded, 0), (bounded, 4), (momentum, 1), (momentum, 4)]


@pytest.mark.parametrize(("make_model", "steps"), WRITING)
def test_all_is_put_back_where_nothing_fits(make_model: Any, steps: int) -> None:
    step, batch = make(make_model, steps)
    none_fits = scarce_in_passes(set(range(12, 10_000)))
    with same_as_before(step), none_fits, pytest.raises(OutOfMemoryError):
        step(batch)


@pytest.mark.parametrize(("make_model", "steps"), WRITING)
@pytest.mark.parametrize("at", [3, 7, 12, 20])
def test_a_redone_micro_batch_finds_what_it_found(make_model: Any, steps: int, at: int) -> None:
    (step, batch), (twin, _) = make(make_model, steps), make(make_model, steps)
    with scarce_in_passes({at}):
        report = step(batch)
    task = twin.task()
    task.effects.begin(task.network.modules)
    plan = replace(twin.plan(ROWS), cut=report.cut, micro_batch=max(report.cut))
    assert carry_out(plan, task, admit(batch, task, None)).loss == report.loss
    assert_same(snapshot(twin), snapshot(step))


@pytest.mark.parametrize("make_model", [bounded, momentum])
def test_planning_changes_no_parameter(make_model: Any) -> None:
    step, batch = make(make_model)
    with same_as_before(step):
        ab.plan(step.model, nn.CrossEntropyLoss(), step.optimizers, batch, **flat({"memory": "1GiB"}))


SCALED = Precision(compute="float16", loss_scale=2.0**14)


@pytest.mark.parametrize(("fault", "steps"), [("overflow", 0), ("memory", 0), ("memory", 4)])
def test_rows_that_are_not_as_before_are_told_and_no_update_is_made(fault: str, steps: int) -> None:
    def rows() -> Any:
        return torch.zeros(8, 4), torch.full((8, 1), 40.0)

    model = Made(lambda self, x: self.linear(x.add_(1.0)), linear=nn.Linear(4, 1))  # in place
    options = {"precision": SCALED if fault == "overflow" else "float32", "check": False}
    step = Step(model, nn.MSELoss(), sgd(model, 1e-4), micro_batch=4, **flat(options))
    for _ in range(steps):
        step(rows())
    first = model.linear.weight.detach().clone()
    for _ in range(2):
        with (
            pytest.raises(AnybatchError, match=r"rows are not as before: hand them over anew, .*x\.clone"),
            scarce_in_passes({3} if fault == "memory" else set()),
        ):
            step(rows())
        assert torch.equal(model.linear.weight, first)


def make_reentrant(*, is_tied: bool = False, **options: Any) -> Step:
    """Trained layers, or one thrice, that are only reached through checkpoints, as adapters are."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # in backward
            fault.replays += 1
            if fault.replays - 1 == fault.at:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.tanh(layer(x))

    def forward(self: Any, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(1).requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(run, layer, hidden, use_reentrant=True)
        return self.head(hidden)

    torch.manual_seed(0)
    fault = SimpleNamespace(replays=0, at=-1)  # no snapshot of modules puts it back
    table, layers = nn.Embedding(20, 8).requires_grad_(False), [nn.Linear(8, 8) for _ in range(3)]
    layers = nn.ModuleList(layers[:1] * 3 if is_tied else layers)
    model = Made(forward, table=table, layers=layers, head=nn.Linear(8, 4), fault=fault)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=4, **flat(options))


# Of each micro-batch a replay, and each layer's.
PLACES = [("step", at) for at in (0, 1, 2, 4, 6, 11)] + [("window", 5)]


@pytest.mark.parametrize("options", [{}, {"accumulate": torch.float64}, {"non_finite": "skip"}], ids=str)
@pytest.mark.parametrize("is_tied", [False, True], ids=["three", "tied"])
@pytest.mark.parametrize(("way", "at"), PLACES)
def test_out_of_memory_in_a_replay_loses_nothing(way: str, at: int, is_tied: bool, options: Any) -> None:
    step, twin = (make_reentrant(is_tied=is_tied, **options) for _ in range(2))
    step.model.fault.at, batch = at, (torch.randint(20, (16, 5)), torch.randint(4, (16,)))
    assert [take(one, way, batch).redone for one in (step, twin)] == [1, 0]
    found, expected = ([*one.model.parameters()] for one in (step, twin))
    assert relative_error(found, expected) <= tolerance(torch.float32, 4)


@pytest.mark.parametrize("is_tied", [False, True], ids=["three", "tied"])
def test_an_overflow_loses_nothing_where_gradients_are_looked_at_in_parts(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anybatch.engine.gradients.BUCKET", 64)  # bytes, less than any layer has
    step, twin = (make_reentrant(is_tied=is_tied, precision="fp16-mixed") for _ in range(2))
    first, batch = [math.inf], (torch.randint(20, (16, 5)), torch.randint(4, (16,)))
    step.model.layers[0].weight.register_hook(lambda gradient: gradient * (first.pop() if first else 1.0))
    twin.scale.give_way()
    assert [one(batch).redone for one in (step, twin)] == [1, 0]
    assert relative_error([*step.model.parameters()], [*twin.model.parameters()]) <= tolerance(
        torch.float32, 4
    )
