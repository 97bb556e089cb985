"""What a step with a memory budget remembers: one plan for each shape of its rows."""

import hashlib
from collections.abc import Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.core import (
    Batch,
    BudgetError,
    PlanError,
    SampleBatch,
    TraceError,
)
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device, parse_memory
from anybatch.planner.candidates import Request
from anybatch.planner.measured import Measured
from anybatch.planner.report import PlanReport
from anybatch.planner.search import choose
from anybatch.planner.shapes import Shape, longest, round_up, row_shape, shaped


class Key(NamedTuple):
    """What a plan is for."""

    shape: Shape  # of a row
    settings: Plan
    refused: str  # why the batch may not be cut
    sized: bool  # whether the size is settled: in a window it is free, even where it is not for batches
    parts: int
    signature: str


class Budget:
    """A budget, and the plans made for it. Batches of rows of another shape get a plan of their own.

    Lengths that differ from batch to batch are rounded up, in at most 25 % steps, so that a few plans serve
    all: a plan for longer rows is one for shorter rows, too, and one for more rows is one for fewer. Where
    the result depends on the cut, each number of rows has a plan of its own.

    Args:
        memory: as for `anybatch.memory.device.parse_memory`.
    """

    def __init__(self, memory: str | int) -> None:
        parse_memory(memory, find_device("cpu"))
        self.memory = memory
        self.plans: dict[Key, Plan] = {}
        self._reports: dict[tuple[Plan, Shape, str], PlanReport] = {}  # of those made here
        self._measured: dict[str, Measured] = {}  # by kind of rows, settings and what is trained
        self._last: tuple[Task, Hashable, Measured] | None = None
        self._first: Shape = ()
        self._varying: set[tuple[int, int]] = set()  # leaf and axis

    def plan(self, request: Request, first: Request | None = None) -> Plan:
        """The plan of a batch: made now, or remembered for rows like these.

        If `first`, another request about the same batch, can be met, its plan is returned. It is not tried
        where `request` has been answered before: then there was none.

        Raises:
            BudgetError: nothing fits.
            PlanError: a module's shapes are not known yet, or there are sparse gradients.
        """
        _refuse_lazy(request.task)
        shape, signature = self._shape(request.batch), _signature(request.task)
        if first is not None and self._known(request, shape, signature) is None:
            with suppress(BudgetError):
                return self._planned(first, shape, signature)
        return self._planned(request, shape, signature)

    def report(self, plan: Plan, request: Request) -> PlanReport | None:
        """What is known of a plan that was made here for rows like these."""
        shape, signature = self._shape(request.batch), _signature(request.task)
        found = [self._reports.get((plan, one, signature)) for one in (shape, self._rounded(shape))]
        return next((report for report in found if report is not None), None)

    def measured(self, task: Task, settings: Plan, kind: Hashable) -> Measured:
        """What is known by readings of rows of this kind, on this task."""
        if self._last is None or self._last[:2] != (task, kind):
            key = f"{kind} {settings.to_json()} {_signature(task)}"
            found = self._measured.get(key)
            if found is None:
                num_bytes = parse_memory(self.memory, device_of(task))
                found = self._measured[key] = Measured(num_bytes, races=self.memory == "auto")
            found.devices = task.devices
            self._last = task, kind, found
        return self._last[2]

    def forget(self) -> None:
        """Plan everything anew."""
        self.plans.clear()
        self._reports.clear()

    def state(self) -> list[dict[str, Any]]:
        """The plans made so far, as JSON can hold them."""
        return [
            {
                **key._asdict(),
                "settings": key.settings.to_json(),
                "memory": self.memory,
                "plan": plan.to_json(),
                "varying": sorted(self._varying),
            }
            for key, plan in self.plans.items()
        ] + [{"memory": self.memory, "key": key, **one.state()} for key, one in self._measured.items()]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Take over what `state` gave: rows like those get the same plans again."""
        for one in state:
            if one["memory"] != self.memory:  # they may not fit now
                continue
            if "readings" in one:
                found = self._measured[one["key"]] = Measured(int(one["num_bytes"]), races=False)
                found.load(one)
                continue
            key = Key(
                shape=tuple([(str(name), tuple(sizes)) for name, sizes in one["shape"]]),
                settings=Plan.from_json(one["settings"]),
                refused=str(one["refused"]),
                sized=bool(one["sized"]),
                parts=int(one.get("parts", 1)),
                signature=str(one["signature"]),
            )
            self.plans[key] = Plan.from_json(one["plan"])
            self._varying |= {(leaf, axis) for leaf, axis in one["varying"]}

    def _planned(self, request: Request, shape: Shape, signature: str) -> Plan:
        known = self._known(request, shape, signature)
        if known is not None:
            return known
        report, longest = self._ask(request, shape, self._rounded(shape))
        self._reports[report.plan, longest, signature] = report
        self.plans[_key(request, longest, signature)] = report.plan
        return report.plan

    def _known(self, request: Request, shape: Shape, signature: str) -> Plan | None:
        """The plan that is remembered: of rows like these, or longer, and of as many, or more."""
        like = request.like
        for known in (shape, self._rounded(shape)):
            plan = self.plans.get(_key(request, known, signature))
            if plan is not None and plan.rows >= like.rows:
                size = min(plan.micro_batch, like.rows)
                return replace(plan, rows=like.rows, micro_batch=size, batch_norm=like.batch_norm)
        return None

    def _ask(self, request: Request, shape: Shape, wanted: Shape) -> tuple[PlanReport, Shape]:
        """The answer, and the longest rows that it is for."""
        request = for_device(request, self.memory, None)
        if wanted != shape:
            with suppress(TraceError, BudgetError):  # longer than the model takes, or than fits
                return choose(replace(request, batch=shaped(wanted, request.batch))), wanted
        return choose(request), shape

    def _shape(self, batch: Batch) -> Shape:
        """What a row of this batch looks like; of samples, the longest of each."""
        shape = longest(batch) if isinstance(batch, SampleBatch) else row_shape(batch.whole)
        first = self._first = self._first or shape
        if [name for name, _ in first] == [name for name, _ in shape]:
            self._varying |= {
                (leaf, axis)
                for leaf, ((_, one), (_, other)) in enumerate(zip(first, shape, strict=True))
                for axis, (size, now) in enumerate(zip(one, other, strict=False))
                if size != now
            }
        return shape

    def _rounded(self, shape: Shape) -> Shape:
        return tuple(
            (
                name,
                tuple(
                    round_up(size) if (leaf, axis) in self._varying else size
                    for axis, size in enumerate(sizes)
                ),
            )
            for leaf, (name, sizes) in enumerate(shape)
        )


def find_plan(request: Request, memory: str | int | None, device: str | torch.device | None) -> PlanReport:
    """Choose a plan for a request on a device, which need not be here, within a budget."""
    return choose(for_device(request, memory, device))


def for_device(request: Request, memory: str | int | None, device: str | torch.device | None) -> Request:
    """The request with device and budget filled in."""
    _refuse_lazy(request.task)
    target = device_of(request.task) if device is None else find_device(device)
    if memory is None:
        return replace(request, device=target, sizes=(request.like.micro_batch,), blocks=())
    return replace(request, device=target, budget=parse_memory(memory, target))


def _refuse_lazy(task: Task) -> None:
    lazy = [type(one).__name__ for one in task.modules if isinstance(one, LazyModuleMixin)]
    if lazy:
        raise PlanError(
            f"Expected modules whose shapes are known where memory is planned, got {lazy[0]}. Run one "
            "forward first, without gradient."
        )


def _key(request: Request, shape: Shape, signature: str) -> Key:
    # Where the result depends on the cut, for so many rows; else one for more rows is one for fewer.
    rows, like = request.like.rows if request.depends_on_cut else 0, request.like
    # Checkpoints from before "not chosen" could be said name it so; `cut_refused` tells them apart.
    settings = replace(like, rows=rows, micro_batch=rows, batch_norm=like.batch_norm or "micro")
    return Key(shape, settings, request.cut_refused, bool(request.sizes), request.parts, signature)


def _signature(task: Task) -> str:
    """What else the bytes depend on: what is trained, in which mode, and how optimizers are set."""
    trained = set(task.parameters)
    # Which ones, by their places: as many others may need other activations.
    places = [p in trained for one in task.modules for p in one.parameters(recurse=False)]
    sizes = [parameter.numel() * parameter.element_size() for parameter in task.parameters]
    training = "".join(["et"[module.training] for module in task.modules])
    settings = [
        (type(one).__name__, [_switches(group) for group in one.param_groups]) for one in task.optimizers
    ]
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [str(torch.get_autocast_dtype(kind)) for kind in kinds]
    found = [p.grad for p in (*task.parameters, *task.others) if p.grad is not None]
    held = sum(one.untyped_storage().nbytes() for one in found if one.layout is torch.strided)
    known = f"{places} {sizes} {training} {settings} {casts}{held or ''}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _switches(group: Mapping[str, Any]) -> list[tuple[str, bool | None]]:
    """Which settings are on, such as momentum: what they are set to costs no bytes."""
    return [
        (name, None if value is None else bool(value))
        for name, value in group.items()
        if value is None or isinstance(value, bool | int | float)
    ]


def device_of(task: Task) -> Device:
    """The device whose memory counts: that of the model."""
    found = {device for device in task.devices if device.type != "meta"}
    if len(found) > 1:
        raise PlanError(
            f"Expected a model on one device for a memory budget, got {sorted(map(str, found))}. "
            "Choose micro_batch= yourself."
        )
    return find_device(next(iter(found), "cpu"))


@contextmanager
def enforced(memory: str | int, task: Task) -> Generator[None]:
    """On CUDA the allocator itself keeps to the budget while a step runs; elsewhere the plan does."""
    if not any(one.type == "cuda" for one in task.devices):  # to look the device up takes milliseconds
        yield
        return
    device = device_of(task)
    before = torch.cuda.get_per_process_memory_fraction(device.name)
    share = min(1.0, parse_memory(memory, device) / device.num_bytes)
    torch.cuda.set_per_process_memory_fraction(share, device.name)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.name)
