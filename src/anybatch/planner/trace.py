"""Runs a step on fake tensors: every byte of it, and no memory."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core import Batch, SampleBatch
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Task, execute
from anybatch.engine import update as optimize
from anybatch.memory import (
    FakeMode,
    Fakes,
    Ledger,
    Mark,
    Meter,
    Recording,
    continued,
    dense_only,
    drop_left_fakes,
    sparse_refused,
    stand_ins,
    undisturbed,
)
from anybatch.planner.feed import fake_batch, run_sizes
from anybatch.state import Streams

_LATE = 1000.0  # steps
CUDA_GRANULE = 512  # bytes that CUDA's caching allocator rounds every size up to


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All bytes of one step, event by event.

    Attributes:
        plan: what was carried out.
        recording: what the meter saw.
        device: what the bytes are for.
        source: "predicted" or "measured".
        granule: what the device's allocator rounds sizes up to, in bytes.
        micro_batches: how many were really run; the others are like the last but one of them.
        idle: parameters of the optimizers that got no gradient, and so have no state.
    """

    plan: Plan
    recording: Recording
    device: str
    source: str
    granule: int
    micro_batches: int
    idle: frozenset[nn.Parameter] = frozenset()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Changes of phase and module, with running counts of operations, FLOPs and bytes moved."""
        return self.recording.marks

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return self.recording.peak(self.granule)

    @property
    def ledger(self) -> Ledger:
        """The bytes by owner, module and moment."""
        return self.recording.ledger(source=self.source, device=self.device, granule=self.granule)


def trace(
    plan: Plan,
    task: Task,
    batch: Batch,
    *,
    device: torch.device | str | None = None,
    idle: Set[nn.Parameter] = frozenset(),
) -> Trace:
    """Run one step on fake tensors, with the optimizer's state as it is from the second step on.

    It is the very code of a step: forward, loss, backward, accumulate, clip, update. Schedulers and listeners
    are left out. Of many micro-batches of one size only the first two, one in the middle and the last are
    run, if each calls the model as often. Model, optimizers, gradients and random streams are as before.
    Whoever asks for a number gets 1, so a branch on values goes one way.

    A device that is not there is approximated: sizes are rounded up as its allocator does, optimizers update
    all parameters at once (foreach) where they would there, and the kernels are the CPU's. Attention is the
    flash kernel's, and workspaces of cuBLAS and cuDNN are not counted.

    Args:
        plan: what is carried out; its rows count, not the batch's.
        task: what it is carried out on. Nothing of it is changed.
        batch: gives shapes and dtypes of the rows, so a few rows are enough.
        device: where the step is to run; None for where the model is.
        idle: parameters known from another trace to get no gradient; where it turns out that there are
            more, and that they were given state of the optimizer, the step is run once more.

    Raises:
        TraceError: it cannot be run without values, for instance because shapes depend on them.
        PlanError: there are sparse gradients.

    Example:
        >>> from anybatch import Step
        >>> from anybatch.core.batch import TensorBatch
        >>> model = nn.Linear(3, 2)
        >>> step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> head = TensorBatch((torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)))
        >>> traced = trace(Plan(rows=10_000, micro_batch=100), step._task(), head)
        >>> traced.ledger.at_peak["parameters"], traced.ledger.at_peak["input"]
        (32, 200000)
    """
    target = device_of(task, device)
    sizes = run_sizes(plan, task.loss, task.model)
    reduced = replace(plan, rows=sum(sizes)) if len(sizes) < plan.micro_batches else plan
    parameters = [*task.parameters, *task.others]
    with (
        private.disable_current_modes(),  # whoever measures real tensors has nothing to see here
        undisturbed(parameters, roots=roots_of(task, batch)) as noted,
        dense_only(parameters),
    ):
        modules = list(dict.fromkeys((*task.modules, *noted.modules)))
        run = partial(run_on_fakes, rows=plan.rows, task=task, batch=batch, target=target, modules=modules)
        recording, found, wrongly = run(reduced, idle=idle)
        if reduced is not plan and (not recording.forwards or recording.forwards % len(sizes)):
            reduced = plan  # none of them stands for others
            recording, found, wrongly = run(plan, idle=idle)
        if wrongly:
            recording, found, _ = run(reduced, idle=found)
        noted.put_back()
        drop_left_fakes()
    if reduced is not plan:
        recording = continued(recording, len(sizes), plan.micro_batches)
    return Trace(
        plan=plan,
        recording=recording,
        device=str(target),
        source="predicted",
        granule=CUDA_GRANULE if target.type == "cuda" else 1,
        micro_batches=reduced.micro_batches,
        idle=found,
    )


def run_on_fakes(
    plan: Plan,
    *,
    rows: int,
    task: Task,
    batch: Batch,
    target: torch.device,
    modules: Sequence[nn.Module],
    idle: Set[nn.Parameter],
    carry_out: Callable[[Plan, Task, Batch], object] = execute,
) -> tuple[Recording, frozenset[nn.Parameter], bool]:
    """What was seen, who got no gradient, and whether state was made for any of those.

    Args:
        plan: of the rows that are run.
        rows: of the logical batch.
        task: what it is carried out on.
        batch: gives shapes and dtypes of the rows.
        target: the device that is planned for.
        modules: all that may hold tensors.
        idle: parameters that get no gradient, and so have no state.
        carry_out: a step, or what else is to be seen.
    """
    mode = FakeMode()
    with stand_ins(mode, modules, task.optimizers) as fakes:
        fake = faked(task, fakes)
        everyone = {parameter: fakes.of(parameter) for parameter in (*task.parameters, *task.others)}
        lacks = {fakes.of(parameter) for parameter in idle}
        del fakes  # and with it what a forward may replace
        updated: set[Tensor] = set()
        with mode.explained(), mode:
            logical, leaves = fake_batch(batch, rows, plan.rows, task.loss)
            _set_foreach(task, target)
            made = make_state(fake, lacks)
            advance(fake)
            meter = Meter(
                task.model,
                task.optimizers,
                loss_module=loss_module_of(task),
                batch_leaves=leaves,
                state=fake.masters.tensors,
                host_apart=target.type != "cpu",
            )
            mode.where = lambda: meter.module
            del leaves
            for one in task.optimizers:
                one.register_step_pre_hook(partial(_note_updated, updated))
            with meter:
                carry_out(plan, fake, logical)
        task.streams.are_rows_known = True
        task.streams.are_rows_written |= fake.streams.are_rows_written
        written = set(fake.streams.written)
        task.streams.write([parameter for parameter, twin in everyone.items() if twin in written])
        found = frozenset(parameter for parameter in task.parameters if everyone[parameter] not in updated)
        wrongly = any(everyone[p] in made and everyone[p] not in updated for p in task.parameters)
        return meter.recording, found, wrongly


def _note_updated(updated: set[Tensor], optimizer: Optimizer, args: object, kwargs: object) -> None:
    updated.update(p for p in optimize.owned([optimizer]) if p.grad is not None)


def roots_of(task: Task, batch: Batch) -> list[object]:
    """All from where a step may reach something."""
    collate = (batch.collate,) if isinstance(batch, SampleBatch) else ()
    return [task.model, task.loss, *task.modules, *task.optimizers, *collate]


def device_of(task: Task, device: torch.device | str | None) -> torch.device:
    """The device asked for; the model's where none is."""
    if device is not None:
        return torch.device(device)
    return next((one for one in task.devices if one.type != "meta"), torch.device("cpu"))


def quiet(task: Task) -> Task:
    """The same task, for steps that do not count: nobody listens, and what it learns it keeps for itself."""
    streams = Streams()
    streams.begin(task.modules)
    streams.are_rows_known = True  # no copies are made of rows that nobody needs
    return replace(task, schedulers=(), listeners=(), streams=streams, scale=task.scale.copy())


def faked(task: Task, fakes: Fakes) -> Task:
    """The same task on fake tensors; nobody listens to it."""

    def of(parameters: Iterable[Tensor]) -> list[Any]:
        return [fakes.of(parameter) for parameter in parameters]

    alone = quiet(task)
    alone.streams.write(of(task.streams.written))
    return replace(
        alone,
        loss=fakes.within(task.loss),
        parameters=of(task.parameters),
        others=of(task.others),
        masters=task.masters.stand_in(fakes.of),
    )


def loss_module_of(task: Task) -> nn.Module:
    """The modules of the loss that the model does not hold."""
    own = set(task.model.modules())
    return nn.ModuleList([module for module in task.modules if module not in own])


def _set_foreach(task: Task, device: torch.device) -> None:
    """On CUDA optimizers choose foreach by themselves, which they do not for tensors that are elsewhere."""
    for optimizer in task.optimizers if device.type == "cuda" else ():
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True


def advance(task: Task) -> None:
    """Let optimizers have made many steps: some, such as RAdam, take less memory in their first ones."""
    for optimizer in task.optimizers:
        for slots in optimizer.state.values():
            step = slots.get("step")
            if isinstance(step, Tensor) and not step.dim():
                slots["step"] = torch.tensor(_LATE, dtype=step.dtype, device=step.device)


def _takes_sparse(optimizer: Optimizer) -> bool:
    held = (one for slots in optimizer.state.values() for one in slots.values())
    is_sparse = any(isinstance(one, Tensor) and one.is_sparse for one in held)
    return is_sparse or isinstance(optimizer, torch.optim.SparseAdam)


def make_state(task: Task, idle: Set[Tensor]) -> set[Tensor]:
    """What the first update of each optimizer makes, if it was not made yet; for whom it was made."""
    made: set[Tensor] = set()
    for optimizer in task.optimizers:
        owned = [p for p in optimize.owned([optimizer]) if p.requires_grad and p not in idle]
        if owned and _takes_sparse(optimizer):
            raise sparse_refused(f"a {type(optimizer).__name__} that takes sparse ones")
        lacking = [p for p in owned if not optimizer.state.get(p)]
        if not lacking:
            continue
        before = [(p, p.grad) for p in owned]
        with task.masters.raised(owned, [optimizer]):
            for p in owned:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for p in owned:
                p.grad = None
        for p, gradient in before:
            p.grad = gradient
        made.update(p for p in lacking if optimizer.state.get(p))
    return made
