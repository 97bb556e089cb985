"""A step that cannot be traced: really run, measured, and taken back."""

from collections.abc import Generator, Iterable, Set
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from anybatch.core import Batch, OutOfMemoryError
from anybatch.engine import Plan, Task, execute
from anybatch.memory import Meter, dense_only, joined, undisturbed
from anybatch.planner.feed import leaves_of, rows_kept
from anybatch.planner.optimizer import Watcher, has_state, trace_update
from anybatch.planner.trace import CUDA_GRANULE, Trace, device_of, loss_module_of, quiet, roots_of


def probe(plan: Plan, task: Task, batch: Batch, *, idle: Set[nn.Parameter] = frozenset()) -> Trace:
    """Measure a step that cannot be traced: really run, on the device of the model, and taken back.

    Forward, loss and backward are real, of two micro-batches at most, so take a plan of small ones; the
    update is run on fake tensors, as no update can be undone. Everything is as before afterwards.

    Args:
        plan: what is carried out.
        task: what it is carried out on.
        batch: real rows, of which the first ones are taken.
        idle: as for `trace`.

    Raises:
        AnybatchError: whatever such a step raises.
        OutOfMemoryError: memory ran out.
        PlanError: there are sparse gradients.

    Example:
        >>> from anybatch import Step
        >>> from anybatch.planner.trace import trace
        >>> model = nn.Linear(3, 2)
        >>> step = Step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
        >>> from anybatch.core.batch import TensorBatch
        >>> batch = TensorBatch((torch.zeros(4, 3), torch.zeros(4, 2)))
        >>> measured = probe(Plan(rows=4, micro_batch=2), step.task(), batch)
        >>> measured.source, measured.peak == trace(Plan(rows=4, micro_batch=2), step.task(), batch).peak
        ('measured', True)
    """
    rows = min(plan.rows, 2 * plan.micro_batch, batch.rows)
    small = replace(plan, rows=rows, micro_batch=min(plan.micro_batch, rows), cut=())
    head = batch if rows == batch.rows else batch.head(rows)
    update, state, made = trace_update(plan, task, idle, leaves_of(head))
    parameters, watcher = [*task.parameters, *task.others], Watcher(task.parameters)
    with (
        rows_kept(head),
        _weights_kept(parameters),
        undisturbed(parameters, task.modules, roots=roots_of(task, batch), is_real=True),
        dense_only(parameters),
    ):
        meter = Meter(
            task.model,
            task.optimizers,
            loss_module=loss_module_of(task),
            batch_leaves=leaves_of(head),
            state=(*task.masters.tensors, *(() if has_state(task) else state)),
        )
        alone = replace(quiet(task), optimizers=(watcher,))
        with meter:
            report = execute(small, alone, head)
        if report.too_large:  # it went on in smaller parts, and those are what was measured
            raise OutOfMemoryError(
                f"Expected {small.micro_batch} rows that can be measured, got out of memory with "
                f"{report.too_large}. Free memory, or allow more."
            )
        task.streams.write(alone.streams.written)
    if watcher.idle & made:
        return probe(plan, task, batch, idle=watcher.idle)
    device = device_of(task, None)
    return Trace(
        plan=plan,
        recording=joined(meter.recording, update, "update"),
        device=str(device),
        source="measured",
        granule=CUDA_GRANULE if device.type == "cuda" else 1,
        micro_batches=small.micro_batches,
        idle=watcher.idle,
    )


@contextmanager
def _weights_kept(parameters: Iterable[nn.Parameter]) -> Generator[None]:
    """Afterwards parameters hold what they did, though a forward has written to them."""
    # On the host, as what is measured has to fit beside them.
    copies = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in copies:
                if not torch.equal(parameter.cpu(), value):
                    parameter.copy_(value)
