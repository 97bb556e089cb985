"""Drift of ranks: each step compares options, and a checksum of a rotating 64th of all tensors."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Batch, PlanError, torch_private as private
from anybatch.engine import Sums, Task
from anybatch.parallel.fingerprint import (
    buffers_of_model,
    checksum,
    loss_of,
    optimizers_of,
    refuse_differences,
    schedulers_of,
    state_of,
)

TURNS = 64  # steps in which every tensor is compared once
_LOOKS = 2  # number of first steps that compare rows
_FEW = 4  # rows compared


class Drift:
    """The values that ranks compare in each step, so that a difference is noticed.

    A load is noticed at once: it replaces containers of the optimizer, or writes to parameters more often
    than an update does. Writes through `.data`, and to buffers, are noticed within 64 steps. Buffers that
    forwards write to, such as running statistics, belong to each rank and are left out.
    """

    def __init__(self) -> None:
        self.is_touched = False  # something was loaded or written since the last step
        self.written = set[int]()  # positions of buffers that forwards write to
        self._turn, self._before = 0, dict[int, int]()
        self._same: dict[str, Any] = {}
        self._containers: list[Any] = []
        self._versions, self._steps = list[int](), list[int]()
        self._steps_read = self._alike = 0

    def begin(self, task: Task, *, is_first: bool) -> None:
        """Read the values to compare, before the forward; all buffers in the first step."""
        self._turn = (self._turn + 1) % TURNS
        self._notice(task)
        self._is_first = is_first
        self._before = self._sums_of(buffers_of_model(task))
        self._same = {
            "optimizer": optimizers_of(task),
            "schedulers": schedulers_of(task),
            "weights": _part(task.network.everyone, self._turn),
            "optimizer state": _part(state_of(task), self._turn),
        }

    def message(self, sums: Sums) -> dict[str, Any]:
        """Return the values to compare with the other ranks, after the last forward."""
        after = self._sums_of(buffers_of_model(sums.task))
        self.written |= {place for place, value in after.items() if self._before.get(place) != value}
        buffers = [] if self._is_first else [pair for pair in after.items() if pair[0] not in self.written]
        same = {**self._same, "loss": loss_of(sums.task, sums.batch)}
        rows = _of_rows(sums.batch) if self._steps_read < _LOOKS else 0
        self._steps_read += 1
        return {"same": same, "buffers": buffers, "touched": self.is_touched, "rows": rows}

    def warn_of_same_rows(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Warn if all ranks passed the same rows in each of the first steps."""
        rows = [one["rows"] for one in said]
        self._alike += bool(rows[0]) and len({*rows}) == 1
        if self._alike == _LOOKS:
            self._alike = -1
            warnings.warn(
                f"Expected other rows on each rank, got the same on all {len(said)} in {_LOOKS} steps: the "
                "batch is made of copies. Give each rank its own share, as with DistributedSampler.",
                stacklevel=2,
            )

    def _notice(self, task: Task) -> None:
        containers = [part for one in task.optimizers for part in (one.state, one.param_groups)]
        is_new = [*map(id, containers)] != [*map(id, self._containers)]
        versions = private.versions(task.network.everyone)
        steps = [new - old for new, old in zip(versions, self._versions, strict=False)]
        is_known = not any(steps) or not self._steps or steps == self._steps
        self.is_touched = bool(self._containers) and (is_new or not is_known)
        self._steps = steps if any(steps) else self._steps
        self._containers, self._versions = containers, versions

    def _sums_of(self, buffers: Sequence[Tensor]) -> dict[int, int]:
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
    heads = [leaf.detach()[:_FEW] for leaf in getattr(batch, "leaves", ()) if leaf.layout is torch.strided]
    differ = any(bool((one != one.flatten()[0]).any()) for one in heads if one.numel())
    return sum(place * checksum(one) for place, one in enumerate(heads, 1)) % 2**61 if differ else 0


def _part(tensors: Sequence[Tensor], turn: int) -> int:
    total, found, at = sum(one.nbytes for one in tensors), 0, 0
    start, stop = total * turn // TURNS, total * (turn + 1) // TURNS
    for place, one in enumerate(tensors, 1):
        first, last = max(start - at, 0) // 8 * 8, min(-(-(stop - at) // 8) * 8, one.nbytes)
        if first < last:
            found += place * checksum(one, first, last)
        at += one.nbytes
    return found % 2**61
