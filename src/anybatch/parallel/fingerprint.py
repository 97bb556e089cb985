"""Hashes that must be equal on all ranks: of model, weights, optimizer, options; a part in each step."""

import dataclasses
import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, PlanError, is_shard, torch_private as private
from anybatch.engine import Plan, Sums, Task, owned
from anybatch.parallel.ranges import within

TURNS = 64  # steps in which every tensor is compared once
_PART = 64 << 10  # bytes of tensors compared at once at least
_LOOKS = 2  # number of first steps that compare rows
_FEW = 4  # rows compared
_CUT = "device_mesh", "placements"  # of a sharded parameter
_PLAIN = (bool, int, float, str, tuple, type(None))
_ADVICE = {
    "weights": "Set the same seed before the model is made, or load the same checkpoint, on every rank",
    "optimizer state": "Load the same state on every rank",
    "buffers": "Load the same buffers on every rank",
    "sharding": "Call fully_shard on the same modules with the same options on every rank",
    "model": "Make the same model, with the same parameters trained, on every rank",
}


def fingerprint(
    task: Task, settings: Plan, compression: object, written: Collection[int] = ()
) -> dict[str, str]:
    """Return a hash of each part of a step that must not differ between ranks; skip `written` buffers."""
    names = task.names()
    plan = dataclasses.asdict(settings) | {"cut": (), "micro_batch": 0, "blocks": ()}
    buffers = [one for place, one in enumerate(buffers_of_model(task)) if place not in written]
    states = [value for p in owned(task.optimizers) for value in state_of(task, p)]
    return {
        "torch": torch.__version__,
        "model": hash_of(
            [
                (names[p], p.shape, p.dtype, *[getattr(p, one, 0) for one in _CUT])
                for p in task.network.parameters
            ]
        ),
        "sharding": hash_of(private.sharding_of(task.model)),
        "weights": hash_of([checksum(p) for p in (*task.network.parameters, *task.model.parameters())]),
        "optimizer": optimizers_of(task),
        "optimizer state": hash_of([*map(checksum, states)]),
        "buffers": hash_of([*map(checksum, buffers)]),
        "schedulers": schedulers_of(task),
        "loss": loss_of(task),
        "options": hash_of(sorted(plan.items(), key=str)),
        "hold": str(getattr(task.strategy, "hold", "")),
        "compression": hash_of([type(compression).__name__, *_plain(getattr(compression, "__dict__", {}))]),
        "updates": str(task.progress.updates),
    }


def optimizers_of(task: Task) -> str:
    """Return a hash of the optimizers' options and counts, such as their steps."""
    states = [slots for one in task.optimizers for slots in one.state.values() if isinstance(slots, dict)]
    held = [value for slots in states for value in slots.values() if isinstance(value, (int, float))]
    options = [(type(one).__name__, *map(_plain, one.param_groups)) for one in task.optimizers]
    return hash_of([options, held])


def schedulers_of(task: Task) -> str:
    """Return a hash of the schedulers' plain state."""
    return hash_of([(type(one).__name__, _plain(one.state_dict())) for one in task.schedulers])


def loss_of(task: Task, batch: Batch | None = None) -> str:
    """Return a hash of the loss's settings; tensors are included if there is a batch."""
    settings: Mapping[str, Any] = getattr(task.loss, "settings", {})  # only torch's losses have them
    values = [*settings.values()] if batch else []
    if batch and not settings:
        inside = {*task.network.inner}
        buffers = [module.buffers(False) for module in task.network.modules if module not in inside]
        values = [*chain(*buffers)]
    sums = [checksum(one) for one in values if isinstance(one, Tensor)]
    return hash_of([type(task.loss).__name__, *task.loss.coefficients.items(), *_plain(settings), *sums])


def state_of(task: Task, p: nn.Parameter) -> list[Tensor]:
    """Return the tensors of a parameter's optimizer state."""
    states = [one.state[p] for one in task.optimizers if p in one.state]
    held = [value for slots in states if isinstance(slots, dict) for value in slots.values()]
    return [value for value in held if isinstance(value, Tensor) and value.layout is torch.strided]


def buffers_of_model(task: Task) -> list[Tensor]:
    """Return the model's buffers."""
    tables = [private.buffers_of(module).values() for module in task.network.inner]
    return [one for table in tables for one in table if one is not None and one.layout is torch.strided]


def refuse_differences(found: Sequence[Mapping[str, str]]) -> None:
    """Raise PlanError if fingerprints differ between ranks; it names the part."""
    for part in found[0]:
        odd = [rank for rank, one in enumerate(found) if one.get(part) != found[0][part]]
        if odd:
            advice = _ADVICE.get(part, f"Pass the same {part} on every rank")
            raise PlanError(
                f"Expected the same {part} on all {len(found)} ranks, got another on ranks {odd} than on "
                f"rank 0. No update was made. {advice}."
            )


def hash_of(value: object) -> str:
    """Return a hash of the text of a value."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def contents(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return numbers that change with each write to a tensor, also through `.data`, which has no version."""
    sums = [checksum(one) if one.layout is torch.strided else 0 for one in tensors]
    return [*zip(private.versions(tensors), sums, strict=True)]


def checksum(value: Tensor, start: int = 0, stop: int | None = None) -> int:
    """Return the sum of all 8-byte words between two bytes: the same bits give the same number."""
    if is_shard(value):  # each rank holds another part
        return 0
    flat = value.detach()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.contiguous().view(-1)
    if not flat.numel():
        return 0
    raw = flat.view(torch.uint8)[start:stop]
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    words = raw.numel() // 8 * 8
    rest = int(raw[words:].sum(dtype=torch.int64)) if words < raw.numel() else 0
    return int(raw[:words].view(torch.int64).sum()) + rest


def _plain(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted([(key, one) for key, one in values.items() if isinstance(one, _PLAIN)])


class Drift:
    """The values that ranks compare in each step, so that a difference is noticed.

    A load is noticed at once: it replaces containers of the optimizer, or writes to parameters more often
    than an update does. Writes through `.data`, and to buffers, are noticed within 64 steps. Buffers that
    forwards write to, such as running statistics, belong to each rank and are left out.
    """

    def __init__(self) -> None:
        self.written = set[int]()  # positions of buffers that forwards write to
        self._turn = 0
        self._containers: list[Any] = []
        self._versions, self._steps = list[int](), list[int]()
        self._steps_read = self._alike = 0

    def begin(self, task: Task, *, is_first: bool) -> None:
        """Read the values to compare, before the forward; all buffers in the first step."""
        self._turn = (self._turn + 1) % TURNS
        containers = [part for one in task.optimizers for part in (one.state, one.param_groups)]
        is_new = [*map(id, containers)] != [*map(id, self._containers)]
        versions = private.versions(task.network.everyone)
        steps = [new - old for new, old in zip(versions, self._versions, strict=False)]
        is_known = not any(steps) or not self._steps or steps == self._steps
        # Something was loaded or written since the last step.
        self.is_touched = bool(self._containers) and (is_new or not is_known)
        self._steps = steps if any(steps) else self._steps
        self._containers, self._versions = containers, versions
        self._is_first = is_first
        self._before = self._sums_of(task)
        weights, state = self._part(task)
        self._same: dict[str, Any] = {"optimizer": optimizers_of(task), "schedulers": schedulers_of(task)}
        self._same |= {"weights": weights, "optimizer state": state}

    def message(self, sums: Sums) -> dict[str, Any]:
        """Return the values to compare with the other ranks, after the last forward."""
        after = self.look(sums.task)
        buffers = [] if self._is_first else [pair for pair in after.items() if pair[0] not in self.written]
        rows = _of_rows(sums.batch) if self._steps_read < _LOOKS else 0
        self._steps_read += 1
        same = {**self._same, "loss": loss_of(sums.task, sums.batch)}
        return {"same": same, "buffers": buffers, "touched": self.is_touched, "rows": rows}

    def look(self, task: Task) -> dict[int, int]:
        """Note which buffers this step has written to; return sums of all that are read in this turn."""
        after = self._sums_of(task) if self._before else {}
        self.written |= {place for place, value in after.items() if self._before.get(place) != value}
        return after

    def warn_of_same_rows(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Warn if all ranks passed the same rows in each of the first steps."""
        rows = [one["rows"] for one in said]
        self._alike += bool(rows[0]) and len({*rows}) == 1 < len(rows)
        if self._alike == _LOOKS:
            self._alike = -1
            warnings.warn(
                f"Expected other rows on each rank, got the same on all {len(said)} in {_LOOKS} steps: the "
                "batch is made of copies. Give each rank its own share, as with DistributedSampler.",
                stacklevel=2,
            )

    def _part(self, task: Task) -> tuple[int, int]:
        """Return sums of this turn's part of all weights, and of their optimizer state."""
        parameters = [p for p in task.network.everyone if not is_shard(p)]
        sizes = [p.nbytes for p in parameters]
        size = max(_PART, -(-sum(sizes) // TURNS) // 8 * 8 + 8)
        part = range(size * self._turn, size * (self._turn + 1))
        weights = states = 0
        for place, start, stop in within(sizes, part):
            p = parameters[place]
            weights += (place + 1) * checksum(p, start, stop)
            for number, one in enumerate(state_of(task, p), place + 1):
                if one.nbytes == p.nbytes:
                    states += number * checksum(one, start, stop)
                elif not start:  # others are read as a whole
                    states += number * checksum(one)
        return weights % 2**61, states % 2**61

    def _sums_of(self, task: Task) -> dict[int, int]:
        buffers = buffers_of_model(task)
        places = range(len(buffers)) if self._is_first else range(self._turn, len(buffers), TURNS)
        return {place: checksum(buffers[place]) for place in places}


def refuse_drift(said: Sequence[Mapping[str, Any]]) -> None:
    """Raise PlanError if a value differs between ranks; it names the value."""
    refuse_differences([one["same"] for one in said])
    known: dict[int, int] = {}
    for number, one in enumerate(said):
        for place, value in one["buffers"]:
            if known.setdefault(place, value) != value:
                raise PlanError(
                    f"Expected the same buffers on all {len(said)} ranks, got another on rank {number}, to "
                    "which no forward has written. No update was made. Load the same state on every rank."
                )


def _of_rows(batch: Batch) -> int:
    """Return a checksum of the first rows of a batch; 0 if they hold one number only."""
    heads = [leaf.detach()[:_FEW] for leaf in batch.leaves if leaf.layout is torch.strided]
    differ = any(bool((one != one.flatten()[0]).any()) for one in heads if one.numel())
    return sum(place * checksum(one) for place, one in enumerate(heads, 1)) % 2**61 if differ else 0
