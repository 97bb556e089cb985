"""Errors in float64: gradients for unequal weights against one whole-batch backward, and who ends where."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.config import RaceCase
from benchmarks.contestants import Entry, Update
from benchmarks.results import Exactness
from benchmarks.tasks import TASKS, Task, make_batch, make_model

UPDATES = 2  # of the comparison of parameters


class GradientRecorder(Optimizer):
    """An optimizer that changes nothing: it keeps a copy of the gradient it is given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.recorded: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = self.param_groups[0]["params"]
        self.recorded[:] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def exactness(case: RaceCase, builders: Mapping[str, Callable[[Entry], Update]], *, seed: int) -> Exactness:
    """Both errors of every contestant, on the task and the cut of `case`."""
    whole = whole_batch_gradient(case, seed=seed)
    ends = {name: _end(case, build, seed=seed) for name, build in builders.items()}
    return Exactness(
        task=case.name,
        gradient={
            name: relative_error(_gradient(case, build, seed=seed), whole) for name, build in builders.items()
        },
        parameters={name: relative_error(end, ends["hand"]) for name, end in ends.items()},
    )


def relative_error(measured: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return ((measured - reference).norm() / reference.norm()).item()


def whole_batch_gradient(case: RaceCase, *, seed: int) -> Tensor:
    """One forward and one backward of torch's own mean on the whole batch: slow and obvious."""
    task = TASKS[case.task]
    model = _make_model(task, seed=seed)
    batch = make_batch(task, case.rows * case.micro_batches, seed=seed, ragged=True, dtype=torch.float64)
    task.mean(model, batch).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _gradient(case: RaceCase, build: Callable[[Entry], Update], *, seed: int) -> Tensor:
    task = TASKS[case.task]
    model = _make_model(task, seed=seed)
    recorder = GradientRecorder(model.parameters())
    update = build(Entry.of(case, task, model, recorder))
    update(make_batch(task, case.rows * case.micro_batches, seed=seed, ragged=True, dtype=torch.float64))
    return torch.cat([gradient.flatten() for gradient in recorder.recorded])


def _end(case: RaceCase, build: Callable[[Entry], Update], *, seed: int) -> Tensor:
    """The parameters after a few updates with micro-batches of equal weight, where every loop is exact."""
    task = TASKS[case.task]
    model = _make_model(task, seed=seed)
    update = build(Entry.of(case, task, model, task.optimizer(model.parameters())))
    for index in range(UPDATES):
        rows = case.rows * case.micro_batches
        update(make_batch(task, rows, seed=seed + index, ragged=False, dtype=torch.float64))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _make_model(task: Task, *, seed: int) -> torch.nn.Module:
    """In float64; without dropout, whose masks depend on the cut."""
    return make_model(task, seed=seed, dtype=torch.float64).eval()
