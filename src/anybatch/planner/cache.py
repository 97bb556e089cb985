"""A memory budget and the plans made for it, one per shape of rows."""

import hashlib
from collections.abc import Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.core import BudgetError, PlanError, SampleBatch
from anybatch.engine import Plan, Task
from anybatch.memory import Device, find_device, parse_memory
from anybatch.planner.measured import Measured
from anybatch.planner.report import PlanReport
from anybatch.planner.request import Request
from anybatch.planner.search import choose
from anybatch.planner.shapes import Shape, longest, row_shape

Key = tuple[str, Shape]  # a hash of task and settings, and the shape of the rows

_LONGER = 1.25  # a plan serves rows up to this factor shorter


class Budget:
    """A memory budget and the plans made for it, one per shape of rows.

    A plan for rows up to 25 % longer, or for more rows, serves shorter or fewer rows, too. If the result
    depends on the cut, each shape and number of rows has its own plan.
    """

    def __init__(self, memory: str | int) -> None:
        parse_memory(memory, find_device("cpu"))
        self.memory = memory
        self.plans: dict[Key, Plan] = {}
        self.report: PlanReport | None = None  # report of the last new plan
        self._measured: dict[str, Measured] = {}  # by kind of rows, settings and task
        self._last: tuple[Task, Hashable, Measured] | None = None

    def plan(self, request: Request, first: Request | None = None) -> Plan:
        """Return the plan of a batch, remembered or new; raise BudgetError if nothing fits.

        If `first`, another request about the same batch, can be met, return its plan. It is not tried if
        `request` has been answered before: then `first` had no plan.
        """
        _refuse_lazy(request.task)
        batch = request.batch
        shape = longest(batch) if isinstance(batch, SampleBatch) else row_shape(batch.whole)
        if first is not None and self._known(request, shape) is None:
            with suppress(BudgetError):
                return self._planned(first, shape)
        return self._planned(request, shape)

    def measured(self, task: Task, settings: Plan, kind: Hashable) -> Measured:
        """Return the readings for rows of this kind on this task."""
        if self._last is None or self._last[:2] != (task, kind):
            key = f"{kind} {settings.to_json()} {_signature(task)}"
            found = self._measured.get(key)
            if found is None:
                num_bytes = parse_memory(self.memory, device_of(task))
                found = self._measured[key] = Measured(num_bytes, races=self.memory == "auto")
            found.devices = task.network.devices
            self._last = task, kind, found
        return self._last[2]

    def forget(self) -> None:
        """Forget all plans."""
        self.plans.clear()

    def state(self) -> list[dict[str, Any]]:
        """Return the plans and readings so far as JSON values."""
        return [
            {"memory": self.memory, "key": key, "shape": shape, "plan": plan.to_json()}
            for (key, shape), plan in self.plans.items()
        ] + [{"memory": self.memory, "key": key, **one.state()} for key, one in self._measured.items()]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Load the output of `state`."""
        for one in state:
            if one["memory"] != self.memory or "key" not in one:  # plans of another budget may not fit
                continue
            if "readings" in one:
                found = self._measured[one["key"]] = Measured(int(one["num_bytes"]), races=False)
                found.load(one)
            else:
                shape = tuple([(str(name), tuple(sizes)) for name, sizes in one["shape"]])
                self.plans[str(one["key"]), shape] = Plan.from_json(one["plan"])

    def _planned(self, request: Request, shape: Shape) -> Plan:
        plan = self._known(request, shape)
        if plan is None:
            self.report = choose(for_device(request, self.memory, None))
            plan = self.plans[_key(request), shape] = self.report.plan
        return plan

    def _known(self, request: Request, shape: Shape) -> Plan | None:
        key, like = _key(request), request.like
        for (known, other), plan in self.plans.items():
            is_for = other == shape or (not request.depends_on_cut and _serves(other, shape))
            if known == key and is_for and plan.rows >= like.rows:
                size = min(plan.micro_batch, like.rows)
                return replace(plan, rows=like.rows, micro_batch=size, batch_norm=like.batch_norm)
        return None


def _serves(known: Shape, shape: Shape) -> bool:
    """Return True if rows of this shape are at most as long as the known ones, and not much shorter."""
    if [(name, len(sizes)) for name, sizes in known] != [(name, len(sizes)) for name, sizes in shape]:
        return False
    pairs = [zip(one, other, strict=True) for (_, one), (_, other) in zip(known, shape, strict=True)]
    return all(size <= most <= _LONGER * size for pair in pairs for most, size in pair)


def find_plan(request: Request, memory: str | int | None, device: str | torch.device | None) -> PlanReport:
    """Choose a plan for a request within a budget, on a device that need not be in this machine."""
    return choose(for_device(request, memory, device))


def for_device(request: Request, memory: str | int | None, device: str | torch.device | None) -> Request:
    """Return the request with device and budget filled in."""
    _refuse_lazy(request.task)
    target = device_of(request.task) if device is None else find_device(device)
    if memory is None:
        return replace(request, device=target, sizes=(request.like.micro_batch,), blocks=())
    return replace(request, device=target, budget=parse_memory(memory, target))


def _refuse_lazy(task: Task) -> None:
    lazy = [type(one).__name__ for one in task.network.modules if isinstance(one, LazyModuleMixin)]
    if lazy:
        raise PlanError(
            f"Expected modules whose shapes are known where memory is planned, got {lazy[0]}. Run one "
            "forward first, without gradient."
        )


def _key(request: Request) -> str:
    # If the result depends on the cut, a plan holds for one number of rows; otherwise also for fewer.
    rows, task = request.like.rows if request.depends_on_cut else 0, request.task
    settings = replace(request.like, rows=rows, micro_batch=rows).to_json()
    # In a window the size may be chosen even if it is fixed for batches.
    sized = (bool(request.sizes), bool(task.add_rows))
    return f"{settings} {request.cut_refused} {sized} {_signature(task)}"


def _signature(task: Task) -> str:
    trained = set(task.network.parameters)
    # Positions, not a count: other parameters may need other activations.
    places = [p in trained for one in task.network.modules for p in one.parameters(recurse=False)]
    sizes = [parameter.numel() * parameter.element_size() for parameter in task.network.parameters]
    training = "".join(["et"[module.training] for module in task.network.modules])
    settings = [
        (type(one).__name__, [_switches(group) for group in one.param_groups]) for one in task.optimizers
    ]
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [str(torch.get_autocast_dtype(kind)) for kind in kinds]
    found = [p.grad for p in (*task.network.parameters, *task.network.others) if p.grad is not None]
    held = sum(one.untyped_storage().nbytes() for one in found if one.layout is torch.strided)
    known = f"{places} {sizes} {training} {settings} {casts}{held or ''}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _switches(group: Mapping[str, Any]) -> list[tuple[str, bool | None]]:
    return [
        (name, None if value is None else bool(value))
        for name, value in group.items()
        if value is None or isinstance(value, bool | int | float)
    ]


def device_of(task: Task) -> Device:
    """Return the device whose memory the budget limits: the model's. Raise PlanError if it has several."""
    found = {device for device in task.network.devices if device.type != "meta"}
    if len(found) > 1:
        raise PlanError(
            f"Expected a model on one device for a memory budget, got {sorted(map(str, found))}. "
            "Choose micro_batch= yourself."
        )
    return find_device(next(iter(found), "cpu"))


@contextmanager
def enforced(memory: str | int, task: Task) -> Generator[None]:
    """Limit CUDA's allocator to the budget while a step runs."""
    device = device_of(task)
    before = torch.cuda.get_per_process_memory_fraction(device.name)
    share = min(1.0, parse_memory(memory, device) / device.num_bytes)
    torch.cuda.set_per_process_memory_fraction(share, device.name)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.name)
