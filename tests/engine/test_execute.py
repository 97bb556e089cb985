"""A plan carried out: what is reported, what is divided, what is put back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch import Plan, Step, Terms, Total
from anybatch.core.batch import TensorBatch, cut_sizes
from anybatch.core.errors import OutOfMemoryError
from anybatch.core.report import Event, MicroBatchDone, StepReport
from anybatch.engine import Task, carry_out
from anybatch.losses.resolve import resolve
from anybatch.state import Snapshot

ROWS = 10
LossFunction = Callable[[nn.Module, Any], Total | Mapping[str, Total]]


class Scale(nn.Module):
    """x -> w x, so that gradients can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Keep(torch.optim.Optimizer):
    """Keeps the gradients it is given and updates nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {"lr": 1.0})
        self.seen: list[list[float | None]] = []

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for p in self.param_groups[0]["params"]]
        self.seen.append([None if grad is None else grad.item() for grad in grads])


def make_task(loss: object, model: nn.Module | None = None, listeners: Any = ()) -> Task:
    model = Scale() if model is None else model
    return Task(
        model=model,
        modules=list(model.modules()),
        loss=resolve(loss),
        optimizers=(Keep(model),),
        schedulers=(),
        parameters=list(model.parameters()),
        others=(),
        batch_norms=(),
        devices={torch.device("cpu")},
        listeners=listeners,
    )


def run(task: Task, batch: Any, micro_batch: int, **options: Any) -> tuple[StepReport, list[float | None]]:
    """The report and the gradients that the optimizer saw."""
    rows = len(batch)
    report = carry_out(Plan(rows=rows, micro_batch=micro_batch, **options), task, TensorBatch(batch))
    (optimizer,) = task.optimizers
    assert isinstance(optimizer, Keep)
    return report, optimizer.seen[-1] if optimizer.seen else []


def total(model: nn.Module, x: Tensor) -> Total:
    """Sum of w x over the positive x, divided by how many there are."""
    valid = x > 0
    return Total((model(x) * valid).sum(), valid.sum())


CUTS = [1, 3, 4, 10]
X = torch.tensor(
    [1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 4.0]
)  # one micro-batch of 3 weighs nothing


@pytest.mark.parametrize("micro_batch", CUTS)
@pytest.mark.parametrize(
    "weight",
    [None, lambda x: (x > 0).sum(), lambda x: int((x > 0).sum())],
    ids=["late", "tensor", "number"],
)
@pytest.mark.parametrize("compensated", [False, True])
def test_sum_over_weight_in_every_cut(micro_batch: int, weight: Any, compensated: bool) -> None:
    heard: list[Event] = []
    task = make_task(Terms(total, weight=weight), listeners=[heard.append])
    report, gradients = run(task, X, micro_batch, compensated=compensated)
    assert gradients == [2.5]
    assert report == StepReport(
        loss=5.0,
        terms={"loss": 5.0},
        weights={"loss": 4.0},
        rows=ROWS,
        micro_batches=-(-ROWS // micro_batch),
        grad_norm=report.grad_norm,
        updated=True,
        cut=tuple(cut_sizes(ROWS, micro_batch)),
    )
    (parameter,) = task.parameters
    assert parameter.grad is None
    (3 * parameter).backward()
    assert parameter.grad == 3.0  # no hook is left
    assert heard[-1] is report
    assert sum(event.rows for event in heard if isinstance(event, MicroBatchDone)) == ROWS


@pytest.mark.parametrize("micro_batch", CUTS)
@pytest.mark.parametrize(
    "weight",
    [
        None,
        lambda x: {"fit": (x > 0).sum(), "size": len(x), "seen": 1, "odd": 1, "none": (x > 9).sum()},
    ],
    ids=["late", "promised"],
)
def test_each_term_is_divided_by_its_own_weight(micro_batch: int, weight: Any) -> None:
    def terms(model: nn.Module, x: Tensor) -> Mapping[str, Total]:
        return {
            "fit": total(model, x),
            "size": Total(model.w.square() * len(x), len(x)),
            "seen": Total(7.0, 1) if x[0] == 1 else Total.zero(),  # a number, and from one micro-batch
            "odd": Total((model.w - model.w).sqrt(), (x == 1).sum()),  # its gradient is NaN
            "none": Total(model.w * 5, (x > 9).sum()),  # weighs nothing, so it counts for nothing
        }

    task = make_task(Terms(terms, coefficients={"size": 0.5, "seen": 0.0, "odd": 0.0}, weight=weight))
    report, gradients = run(task, X, micro_batch)
    assert gradients == [2.5 + 0.5 * 4]
    assert report.weights == {"fit": 4, "size": ROWS, "seen": 1, "odd": 1, "none": 0}
    assert report.loss == 5.0 + 0.5 * 4
    values = dict(report.terms)
    assert math.isnan(values.pop("none"))
    assert values == {"fit": 5.0, "size": 4.0, "seen": 7.0, "odd": 0.0}


@pytest.mark.parametrize("micro_batch", CUTS)
@pytest.mark.parametrize("loss", [total, Terms(total, weight=lambda x: 0)])
def test_fully_masked_batch_is_no_update(micro_batch: int, loss: object) -> None:
    task = make_task(loss)
    report, gradients = run(task, -X.abs(), micro_batch, clip_norm=1.0)
    assert gradients == []
    assert not report.updated
    assert math.isnan(report.loss)
    assert math.isnan(report.terms["loss"])
    assert (report.weights, report.rows) == ({"loss": 0.0}, ROWS)
    assert task.parameters[0].grad is None


def test_parameters_that_get_no_gradient_have_none_in_the_update() -> None:
    class Two(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.tensor(1.0))

    for options in ({}, {"accumulate": "float64"}, {"compensated": True}):
        assert run(make_task(total, Two()), X, 3, **options)[1] == [2.5, None]  # type: ignore[arg-type]


def test_the_cut_and_the_blocks_of_a_plan_are_obeyed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(x).exp()

    class Calls(TorchDispatchMode):
        """Counts exponentials; what a block itself counts is put back when it runs again."""

        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.exp.default
            return func(*args, **(kwargs or {}))

    def gradients(blocks: tuple[tuple[str, str], ...]) -> tuple[StepReport, list[Any], int]:
        model = nn.Sequential(Block(), Block())
        task = make_task(nn.L1Loss(reduction="sum"), model)
        batch = TensorBatch((X / 9, torch.zeros(ROWS)))
        plan = Plan(rows=ROWS, micro_batch=5, cut=(1, 5, 4), blocks=blocks)
        with Calls() as calls:
            report = carry_out(plan, task, batch)
        return report, task.optimizers[0].seen, calls.count  # type: ignore[attr-defined]

    report, kept, calls = gradients(())
    again, rebuilt, more_calls = gradients((("0", "recompute"),))
    assert report.cut == again.cut == (1, 5, 4)
    assert kept == rebuilt
    assert (calls, more_calls) == (6, 9)


def test_memory_that_runs_out_again_while_buffers_are_compared_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Comparing takes memory on a GPU; gradients that were there come back before anything that may fail."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), batch_norm="micro")
    found = {p: torch.ones_like(p) for p in model.parameters()}
    for parameter, gradient in found.items():
        parameter.grad = gradient
    mean = model[1].running_mean.clone()

    def scarce(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def fail(*_: Any) -> None:
        monkeypatch.setattr(torch, "equal", scarce)
        scarce()

    model.register_forward_hook(fail)
    with pytest.raises(OutOfMemoryError):
        step((torch.randn(4, 4), torch.randn(4, 8)))
    monkeypatch.undo()
    assert all(parameter.grad is gradient for parameter, gradient in found.items())
    assert torch.equal(model[1].running_mean, mean)


def test_where_there_is_no_room_to_note_anything_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    made: list[int] = []

    def noted(self: Snapshot, *args: Any, **options: Any) -> None:
        made.append(1)
        raise MemoryError("full")

    monkeypatch.setattr(Snapshot, "__init__", noted)
    with pytest.raises(OutOfMemoryError, match="room for copies of buffers"):
        step((torch.randn(4, 2), torch.randn(4, 2)))
    assert len(made) >= 2  # once more with caches freed
