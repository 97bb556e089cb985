"""Steps that really run: one that cannot be traced, measured in bytes; and short runs, timed."""

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core import Batch, OutOfMemoryError, SampleBatch, TensorBatch, tensors_in, tree
from anybatch.core import torch_private as private
from anybatch.engine import (
    Plan,
    Task,
    accumulation_dtype,
    carry_out,
    clip,
    norm_of,
    owned,
    snapshot,
    step_optimizers,
)
from anybatch.memory import FakeMode, Meter, Recording, dense_only, joined, replaced_by_fakes, undisturbed
from anybatch.planner.trace import (
    CUDA_GRANULE,
    Trace,
    advance,
    device_of,
    faked,
    leaves_of,
    loss_module_of,
    make_state,
    quiet,
    roots_of,
)
from anybatch.state import ObjectState, rng

# ---- an update by itself


def trace_update(
    plan: Plan, task: Task, idle: Set[nn.Parameter], rows: Iterable[Tensor]
) -> tuple[Recording, list[Tensor], frozenset[nn.Parameter]]:
    """The update alone, on fake tensors; the state that optimizers hold in it, and for whom it was made."""
    mode = FakeMode()
    with (
        private.disable_current_modes(),  # as in `trace`
        undisturbed([*task.parameters, *task.others]),
        replaced_by_fakes(mode, task.modules, task.optimizers) as fakes,
    ):
        fake = faked(task, fakes)
        lacks = {fakes.of(parameter) for parameter in idle}
        with mode.explained("an update", "choose micro_batch= yourself, without memory="), mode:
            made = make_state(fake, lacks)
            advance(fake)
            gradients = {
                p: torch.zeros_like(p, dtype=accumulation_dtype(p.dtype, plan.accumulation_dtype))
                for p in fake.parameters
                if p not in lacks
            }
            for parameter, gradient in gradients.items():
                if gradient.dtype == parameter.dtype:
                    parameter.grad = gradient
            meter = Meter(
                task.model,
                task.optimizers,
                loss_module=loss_module_of(task),
                batch_leaves=[fakes.of(leaf.detach()) for leaf in rows],
                state=fake.masters.tensors,
                held=list(gradients.values()),
            )
            with meter:
                norm = norm_of(gradients.values())
                if not math.isinf(plan.clip_norm):
                    clip(gradients.values(), norm, plan.clip_norm)
                with fake.masters.raised(gradients, fake.optimizers):
                    step_optimizers(gradients, task.optimizers)
            state = state_of(task)
        found = frozenset(p for p in task.parameters if fakes.of(p) in made)
    return meter.recording, state, found


def state_of(task: Task) -> list[Tensor]:
    """The state that optimizers hold."""
    return [one for each in task.optimizers for one in tensors_in(list(each.state.values()))]


class NoUpdate(Optimizer):
    """Updates nothing, but notes which parameters got no gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.idle: frozenset[nn.Parameter] = frozenset()
        super().__init__(list(parameters), {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        """Note them, and leave all as it is."""
        self.idle = frozenset(p for p in owned([self]) if p.grad is None)


# ---- bytes


def measure_step(plan: Plan, task: Task, batch: Batch, *, idle: Set[nn.Parameter] = frozenset()) -> Trace:
    """Measure a step that cannot be traced: really run, on the device of the model, and taken back.

    Forward, loss and backward are real, of two micro-batches at most; the update, which cannot be undone, is
    run on fake tensors.
    """
    rows = min(plan.rows, 2 * plan.micro_batch, batch.rows)
    small = replace(plan, rows=rows, micro_batch=min(plan.micro_batch, rows), cut=())
    head = batch if rows == batch.rows else batch.only(range(rows))
    update, state, made = trace_update(plan, task, idle, leaves_of(head))
    parameters, no_update = [*task.parameters, *task.others], NoUpdate(task.parameters)
    with (
        values_kept([*parameters, *tensors_in(head.given)]),
        undisturbed(parameters, task.modules, roots=roots_of(task, batch), is_real=True),
        dense_only(parameters),
    ):
        meter = Meter(
            task.model,
            task.optimizers,
            loss_module=loss_module_of(task),
            batch_leaves=leaves_of(head),
            state=(*task.masters.tensors, *(() if state_of(task) else state)),
        )
        alone = replace(quiet(task), optimizers=(no_update,))
        with meter:
            # A window notes the state once more, when it is opened.
            opened = snapshot(alone, head) if task.add_rows else None
            report = carry_out(small, alone, head)
            del opened
        if report.too_large:  # it went on in smaller parts, and those are what was measured
            raise OutOfMemoryError(
                f"Expected {small.micro_batch} rows that can be measured, got out of memory with "
                f"{report.too_large}. Free memory, or allow more."
            )
        known = task.effects.buffers
        task.effects.writes(alone.effects.parameters)
        task.effects.changes(alone.effects.buffers)
    if no_update.idle & made or task.effects.buffers != known:
        return measure_step(plan, task, batch, idle=no_update.idle)
    device = device_of(task, None)
    return Trace(
        plan=plan,
        recording=joined(meter.recording, update, "update"),
        device=str(device),
        source="measured",
        granule=CUDA_GRANULE if device.type == "cuda" else 1,
        micro_batches=small.micro_batches,
        idle=no_update.idle,
    )


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Generator[None]:
    """Afterwards tensors hold what they did, though a forward has written to them."""
    # On the host, as what is measured has to fit beside them.
    copies = [(one, one.detach().to("cpu", copy=True)) for one in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in copies:
                if not torch.equal(tensor.cpu(), value):
                    tensor.copy_(value)


# ---- seconds


ROUNDS = 5


def repeated(batch: Batch, rows: int) -> Batch:
    """A batch of so many rows: the first ones, from the start again where there are not enough."""
    if rows <= batch.rows:
        return batch.only(range(rows))
    if isinstance(batch, SampleBatch):
        return SampleBatch([batch.given[row % batch.rows] for row in range(rows)], batch.collate)
    places = torch.arange(rows) % batch.rows
    return TensorBatch(tree.map_leaves(lambda leaf: leaf[places.to(leaf.device)], batch.whole))


def seconds_per_row(plans: Sequence[Plan], task: Task, batch: Batch, *, limit_s: float) -> list[float | None]:
    """Median seconds per row of forward and backward under each plan; None where memory or time ran out.

    A cut plan is timed on two micro-batches, so that adding to gradients is part of it. The plans take turns.
    They run on copies of the rows; all that a forward reaches is put back.
    """
    alone = task.aside(optimizers=())
    reached = reached_by(alone, batch)
    times: list[list[float]] = [[] for _ in plans]
    failed: set[int] = set()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for index, plan in enumerate(plans):
            enough = times[index] and time.perf_counter() - start > limit_s
            if enough or index in failed or time.perf_counter() - start > 2 * limit_s:
                continue
            try:
                times[index].append(_timed_run(plan, alone, batch))
            except Exception:  # the step meets it again, and says what is to be said
                failed.add(index)
            finally:
                reached.put_back()
    # The first run warms caches up; where there are more it is no measure.
    return [
        None if index in failed or not found else statistics.median(found[1:] or found)
        for index, found in enumerate(times)
    ]


def _timed_run(plan: Plan, task: Task, batch: Batch) -> float:
    rows = min(plan.rows, 2 * plan.micro_batch)
    few = repeated(batch, rows).copied()
    short = replace(plan, rows=rows, micro_batch=min(plan.micro_batch, rows), cut=())
    before, random = snapshot(task, few), rng.capture_process()
    try:
        _wait(task)
        start = time.perf_counter()
        carry_out(short, task, few)
        _wait(task)
        return (time.perf_counter() - start) / rows
    finally:
        before.put_back()
        before.put_gradients_back()
        rng.restore_process(random)


def reached_by(task: Task, batch: Batch) -> ObjectState:
    """All that a run reaches; the task's own parameters and buffers are put back otherwise."""
    collate = (batch.collate,) if isinstance(batch, SampleBatch) else ()
    known = [p for module in task.modules for p in (*module.parameters(), *module.buffers())]
    return ObjectState([task.model, task.loss, *task.modules, *collate], but_for=known)


def _wait(task: Task) -> None:
    for device in task.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
