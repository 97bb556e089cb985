"""Runs a step on fake tensors: every byte of it, and no memory."""

from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from anybatch import optimize
from anybatch.batch import Batch, SampleBatch
from anybatch.execute import execute
from anybatch.fakes import FakeMode, Fakes, drop_left_fakes, stand_ins, undisturbed
from anybatch.feed import fake_batch, leaves_of, rows_kept, run_sizes
from anybatch.gradients import accumulation_dtype
from anybatch.ledger import Ledger
from anybatch.meter import Meter
from anybatch.plan import Plan
from anybatch.recording import Mark, Recording, continued, joined
from anybatch.surroundings import Streams
from anybatch.task import Task
from anybatch.tree import tensors_in

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
    run. Model, optimizers, gradients and random streams are as before. Whoever asks for a number gets 1, so
    a branch on values goes one way.

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

    Example:
        >>> from anybatch import Step
        >>> from anybatch.batch import TensorBatch
        >>> model = nn.Linear(3, 2)
        >>> step = Step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> head = TensorBatch((torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)))
        >>> traced = trace(Plan(rows=10_000, micro_batch=100), step._task(), head)
        >>> traced.ledger.at_peak["parameters"], traced.ledger.at_peak["input"]
        (32, 200000)
    """
    target = _device(task, device)
    sizes = run_sizes(plan, task.loss, task.model)
    reduced = replace(plan, rows=sum(sizes)) if len(sizes) < plan.micro_batches else plan
    with (
        _disable_current_modes(),  # whoever measures real tensors has nothing to see here
        undisturbed([*task.parameters, *task.others], roots=_roots(task, batch)) as noted,
    ):
        modules = list(dict.fromkeys((*task.modules, *noted.modules)))
        run = partial(_run, reduced, plan.rows, task, batch, target, modules)
        recording, found, wrongly = run(idle)
        if wrongly:
            recording, found, _ = run(found)
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
        micro_batches=len(sizes),
        idle=found,
    )


def _run(
    plan: Plan,
    rows: int,
    task: Task,
    batch: Batch,
    target: torch.device,
    modules: Sequence[nn.Module],
    idle: Set[nn.Parameter],
) -> tuple[Recording, frozenset[nn.Parameter], bool]:
    """What was seen, who got no gradient, and whether state was made for any of those."""
    mode = FakeMode()
    with stand_ins(mode, modules, task.optimizers) as fakes:
        fake = _faked(task, fakes)
        own = [(parameter, fakes.of(parameter)) for parameter in task.parameters]
        everyone = [(parameter, fakes.of(parameter)) for parameter in (*task.parameters, *task.others)]
        lacks = {fakes.of(parameter) for parameter in idle}
        del fakes  # and with it what a forward may replace
        updated: set[Tensor] = set()
        with mode.explained(), mode:
            logical, leaves = fake_batch(batch, rows, plan.rows, task.loss)
            _set_foreach(task, target)
            made = _make_state(fake, lacks)
            _advance(fake)
            meter = Meter(
                task.model,
                task.optimizers,
                loss_module=_loss_module(task),
                batch_leaves=leaves,
                state=fake.masters.tensors,
                host_apart=target.type != "cpu",
            )
            mode.where = lambda: meter.module
            del leaves
            for one in task.optimizers:
                one.register_step_pre_hook(partial(_note_updated, updated))
            with meter:
                execute(plan, fake, logical)
        written = set(fake.streams.written)
        task.streams.write([parameter for parameter, twin in everyone if twin in written])
        found = frozenset(parameter for parameter, twin in own if twin not in updated)
        wrongly = any(twin in made and twin not in updated for _, twin in own)
        return meter.recording, found, wrongly


def _note_updated(updated: set[Tensor], optimizer: Optimizer, args: object, kwargs: object) -> None:
    updated.update(p for p in optimize.owned([optimizer]) if p.grad is not None)


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

    Example:
        >>> from anybatch import Step
        >>> model = nn.Linear(3, 2)
        >>> step = Step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
        >>> from anybatch.batch import TensorBatch
        >>> batch = TensorBatch((torch.zeros(4, 3), torch.zeros(4, 2)))
        >>> measured = probe(Plan(rows=4, micro_batch=2), step._task(), batch)
        >>> measured.source, measured.peak == trace(Plan(rows=4, micro_batch=2), step._task(), batch).peak
        ('measured', True)
    """
    rows = min(plan.rows, 2 * plan.micro_batch, batch.rows)
    small = replace(plan, rows=rows, micro_batch=min(plan.micro_batch, rows), cut=())
    head = batch if rows == batch.rows else batch.head(rows)
    update, state, made = _trace_update(plan, task, idle, leaves_of(head))
    known = [one for optimizer in task.optimizers for one in tensors_in(list(optimizer.state.values()))]
    parameters, watcher = [*task.parameters, *task.others], _Watcher(task.parameters)
    with (
        rows_kept(head),
        _weights_kept(parameters),
        undisturbed(parameters, task.modules, roots=_roots(task, batch), is_real=True),
    ):
        meter = Meter(
            task.model,
            task.optimizers,
            loss_module=_loss_module(task),
            batch_leaves=leaves_of(head),
            state=(*task.masters.tensors, *(() if known else state)),
        )
        streams = Streams()
        streams.begin(task.modules)
        quiet = replace(task, optimizers=(watcher,), schedulers=(), listeners=(), streams=streams)
        quiet = replace(quiet, scale=task.scale.copy())
        with meter:
            execute(small, quiet, head)
        task.streams.write(streams.written)
    if watcher.idle & made:
        return probe(plan, task, batch, idle=watcher.idle)
    device = _device(task, None)
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
    copies = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in copies:
                if not torch.equal(parameter, value):
                    parameter.copy_(value)


class _Watcher(Optimizer):
    """Updates nothing, but sees which parameters got no gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.idle: frozenset[nn.Parameter] = frozenset()
        super().__init__(list(parameters), {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        """Look, and leave all as it is."""
        self.idle = frozenset(p for p in optimize.owned([self]) if p.grad is None)


def _trace_update(
    plan: Plan, task: Task, idle: Set[nn.Parameter], rows: Iterable[Tensor]
) -> tuple[Recording, list[Tensor], frozenset[nn.Parameter]]:
    """The update alone, on fake tensors; the state that optimizers hold in it, and for whom it was made."""
    mode = FakeMode()
    with (
        undisturbed([*task.parameters, *task.others]),
        stand_ins(mode, task.modules, task.optimizers) as fakes,
    ):
        fake = _faked(task, fakes)
        lacks = {fakes.of(parameter) for parameter in idle}
        with mode:
            made = _make_state(fake, lacks)
            _advance(fake)
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
                loss_module=_loss_module(task),
                batch_leaves=[fakes.of(leaf.detach()) for leaf in rows],
                state=fake.masters.tensors,
                held=list(gradients.values()),
            )
            with meter:
                optimize.clip(gradients, plan.clip_norm)
                with fake.masters.raised(gradients):
                    optimize.update(gradients, task.optimizers)
            state = [one for each in task.optimizers for one in tensors_in(list(each.state.values()))]
        found = frozenset(p for p in task.parameters if fakes.of(p) in made)
    return meter.recording, state, found


def _roots(task: Task, batch: Batch) -> list[object]:
    """All from where a step may reach something."""
    collate = (batch.collate,) if isinstance(batch, SampleBatch) else ()
    return [task.model, task.loss, *task.modules, *task.optimizers, *collate]


def _device(task: Task, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return next((one for one in task.devices if one.type != "meta"), torch.device("cpu"))


def _faked(task: Task, fakes: Fakes) -> Task:
    def of(parameters: Iterable[Tensor]) -> list[Any]:
        return [fakes.of(parameter) for parameter in parameters]

    streams = Streams()
    streams.begin(task.modules)
    streams.write(of(task.streams.written))

    return replace(
        task,
        loss=fakes.within(task.loss),
        parameters=of(task.parameters),
        others=of(task.others),
        schedulers=(),
        listeners=(),
        streams=streams,
        masters=task.masters.stand_in(fakes.of),
        scale=task.scale.copy(),
    )


def _loss_module(task: Task) -> nn.Module:
    own = set(task.model.modules())
    return nn.ModuleList([module for module in task.modules if module not in own])


def _set_foreach(task: Task, device: torch.device) -> None:
    """On CUDA optimizers choose foreach by themselves, which they do not for tensors that are elsewhere."""
    for optimizer in task.optimizers if device.type == "cuda" else ():
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True


def _advance(task: Task) -> None:
    """Let optimizers have made many steps: some, such as RAdam, take less memory in their first ones."""
    for optimizer in task.optimizers:
        for slots in optimizer.state.values():
            step = slots.get("step")
            if isinstance(step, Tensor) and not step.dim():
                slots["step"] = torch.tensor(_LATE, dtype=step.dtype, device=step.device)


def _make_state(task: Task, idle: Set[Tensor]) -> set[Tensor]:
    """What the first update of each optimizer makes, if it was not made yet; for whom it was made."""
    made: set[Tensor] = set()
    for optimizer in task.optimizers:
        owned = [p for p in optimize.owned([optimizer]) if p.requires_grad and p not in idle]
        lacking = [p for p in owned if not optimizer.state.get(p)]
        if not lacking:
            continue
        before = [(p, p.grad) for p in owned]
        with task.masters.raised(owned):
            for p in owned:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for p in owned:
                p.grad = None
        for p, gradient in before:
            p.grad = gradient
        made.update(p for p in lacking if optimizer.state.get(p))
    return made
