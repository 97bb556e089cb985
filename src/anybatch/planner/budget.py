"""A memory budget: readings for each kind of rows, and plans for a device."""

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.core import PlanError, accelerator
from anybatch.engine import Plan, Task
from anybatch.memory import CARDS_BY_NAME, Device, find_device, parse_memory, sparse_refused
from anybatch.planner.ladder import Ladder
from anybatch.planner.report import PlanReport
from anybatch.planner.request import Request
from anybatch.planner.search import choose


class Budget:
    """A memory budget, and a ladder of readings for each kind of rows."""

    def __init__(self, memory: str | int) -> None:
        parse_memory(memory, find_device(CARDS_BY_NAME[0]))  # refuses a wrong text, and asks no device
        self.memory = memory
        self._ladders: dict[str, Ladder] = {}  # by kind of rows, settings and task
        self._last: tuple[Task, Hashable, Ladder] | None = None

    def ladder(self, task: Task, settings: Plan, kind: Hashable) -> Ladder:
        """Return the ladder for rows of this kind on this task.

        Raises:
            PlanError: the model is on several devices, has lazy modules or makes sparse gradients.
        """
        if self._last is None or self._last[:2] != (task, kind):
            _refuse_unreadable(task)
            key = f"{kind} {settings.to_json()} {_signature(task)}"
            found = self._ladders.get(key)
            if found is None:
                found = Ladder(parse_memory(self.memory, device_of(task)), settings)
                self._ladders[key] = found
            found.offloads = any(map(accelerator.has_streams, task.network.devices))
            self._last = task, kind, found
        return self._last[2]

    def forget(self) -> None:
        """Forget all readings."""
        self._ladders.clear()
        self._last = None

    def state(self) -> list[dict[str, Any]]:
        """Return the readings so far as JSON values."""
        return [
            {
                "memory": self.memory,
                "key": key,
                "bytes": one.num_bytes,
                "settings": one.plain.settings.to_json(),
                "refused": one.refused,
                "rungs": one.state(),
            }
            for key, one in self._ladders.items()
        ]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Load the output of `state`; readings of another budget, or of older versions, are left out."""
        for one in state:
            if one["memory"] != self.memory or "rungs" not in one:
                continue
            with suppress(PlanError):  # settings of an older version
                ladder = Ladder(int(one["bytes"]), Plan.from_json(one["settings"]))
                ladder.load(one["rungs"])
                ladder.refused = str(one["refused"])
                self._ladders[str(one["key"])] = ladder


def find_plan(request: Request, memory: str | int | None, device: str | torch.device | None) -> PlanReport:
    """Choose a plan for a request within a budget, on a device that need not be in this machine."""
    refuse_lazy(request.task.network.modules)
    target = device_of(request.task) if device is None else find_device(device)
    if memory is None:
        return choose(replace(request, device=target, sizes=(request.like.micro_batch,), blocks=()))
    return choose(replace(request, device=target, budget=parse_memory(memory, target)))


def _refuse_unreadable(task: Task) -> None:
    refuse_lazy(task.network.modules)
    trained = set(task.network.parameters)
    sparse = [
        type(one).__name__
        for one in task.network.modules
        if getattr(one, "sparse", False) and not trained.isdisjoint(one.parameters(recurse=False))
    ]
    optimizers = [type(one).__name__ for one in task.optimizers if isinstance(one, torch.optim.SparseAdam)]
    if sparse or optimizers:
        raise sparse_refused(f"those of {(sparse or optimizers)[0]}")


def refuse_lazy(modules: Iterable[nn.Module]) -> None:
    """Raise PlanError if a module takes its shapes from its first forward."""
    lazy = [type(one).__name__ for one in modules if isinstance(one, LazyModuleMixin)]
    if lazy:
        raise PlanError(
            f"Expected modules whose shapes are known, got {lazy[0]}. Run one forward without gradient first."
        )


def _signature(task: Task) -> str:
    trained = set(task.network.parameters)
    # Positions, not a count: other parameters may need other activations.
    places = [p in trained for one in task.network.modules for p in one.parameters(recurse=False)]
    sizes = [parameter.numel() * parameter.element_size() for parameter in task.network.parameters]
    training = "".join(["et"[getattr(module, "training", False)] for module in task.network.modules])
    settings = [
        (type(one).__name__, [_switches(group) for group in one.param_groups]) for one in task.optimizers
    ]
    kinds = [kind for kind in sorted(task.network.kinds | {"cpu"}) if torch.is_autocast_enabled(kind)]
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


def limit_of(memory: str | int, task: Task, held: int) -> tuple[torch.device, int]:
    """Return the device of a step, and the bytes beyond which its allocator shall refuse.

    Args:
        memory: the budget.
        task: of the step.
        held: bytes of parameters, buffers, optimizer state and batch; what else is allocated does not count.
    """
    device = device_of(task)
    place = torch.device(device.name)
    others = max(0, accelerator.allocated(place) - held)
    return place, parse_memory(memory, device) + others
