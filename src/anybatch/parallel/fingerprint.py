"""Short hashes that must be equal on all ranks: model, weights, optimizer, buffers, loss, options."""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Batch, PlanError, is_shard, torch_private as private
from anybatch.engine import Plan, Task, owned
from anybatch.losses import SummedLoss

_ADVICE = {
    "weights": "Set the same seed before the model is made, or load the same checkpoint, on every rank",
    "optimizer state": "Load the same state on every rank",
    "buffers": "Load the same buffers on every rank",
    "model": "Make the same model, with the same parameters trained, on every rank",
}


def fingerprint(
    task: Task, settings: Plan, compression: object, written: Collection[int] = ()
) -> dict[str, str]:
    """Return a hash of each part of a step that must not differ between ranks; skip `written` buffers."""
    names = task.names()
    plan = dataclasses.asdict(settings) | {"cut": (), "micro_batch": 0, "blocks": ()}
    buffers = [one for place, one in enumerate(buffers_of_model(task)) if place not in written]
    return {
        "torch": torch.__version__,
        "model": _hash([(names[p], tuple(p.shape), str(p.dtype), _cut(p)) for p in task.network.parameters]),
        "weights": _hash([checksum(p) for p in (*task.network.parameters, *task.model.parameters())]),
        "optimizer": optimizers_of(task),
        "optimizer state": _hash([*map(checksum, state_of(task))]),
        "buffers": _hash([*map(checksum, buffers)]),
        "schedulers": schedulers_of(task),
        "loss": loss_of(task),
        "options": _hash(sorted(plan.items(), key=str)),
        "hold": str(getattr(task.strategy, "hold", "")),
        "compression": _hash([type(compression).__name__, *_plain(getattr(compression, "__dict__", {}))]),
        "updates": str(task.progress.updates),
    }


def _cut(parameter: Any) -> str:
    return f"{parameter.device_mesh} {parameter.placements}" if is_shard(parameter) else ""


def optimizers_of(task: Task) -> str:
    """Return a hash of the optimizers' options and counts, such as their steps."""
    counts = [
        value
        for one in task.optimizers
        for slots in one.state.values()
        if isinstance(slots, dict)
        for value in slots.values()
        if isinstance(value, int | float)
    ]
    options = [(type(one).__name__, *map(_plain, one.param_groups)) for one in task.optimizers]
    return _hash([options, counts])


def schedulers_of(task: Task) -> str:
    """Return a hash of the schedulers' plain state."""
    return _hash([(type(one).__name__, _plain(one.state_dict())) for one in task.schedulers])


def loss_of(task: Task, batch: Batch | None = None) -> str:
    """Return a hash of the loss's settings; tensors are included unless they have an entry per row."""
    settings: Mapping[str, Any] = getattr(task.loss, "settings", {})  # only torch's losses have them
    values = [*settings.values()]
    if batch is None or (isinstance(task.loss, SummedLoss) and task.loss.has_entries_per_row(batch)):
        values = []
    elif not settings:
        inside = {*task.model.modules()}
        values = [
            one for module in task.network.modules if module not in inside for one in module.buffers(False)
        ]
    sums = [checksum(one) for one in values if isinstance(one, Tensor)]
    return _hash([type(task.loss).__name__, *task.loss.coefficients.items(), *_plain(settings), *sums])


def state_of(task: Task) -> list[Tensor]:
    """Return the tensors of the optimizers' states, in the order of their parameters."""
    states = [one.state.get(p) for one in task.optimizers for p in owned([one])]
    held = [value for slots in states if isinstance(slots, dict) for value in slots.values()]
    return [value for value in held if isinstance(value, Tensor) and value.layout is torch.strided]


def buffers_of_model(task: Task) -> list[Tensor]:
    """Return the model's buffers."""
    tables = [private.buffers_of(module).values() for module in task.model.modules()]
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


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def contents(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return numbers that change with each write to a tensor, also through `.data`, which has no version."""
    held = [*tensors]
    sums = [checksum(one) if one.layout is torch.strided else 0 for one in held]
    return [*zip(private.versions(held), sums, strict=True)]


def checksum(value: Tensor, start: int = 0, stop: int | None = None) -> int:
    """Return the sum of all 8-byte words between two bytes: the same bits give the same number."""
    if is_shard(value):  # each rank holds another part
        return 0
    flat = value.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if not flat.numel():
        return 0
    raw = flat.view(torch.uint8)[start:stop]
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    words = raw.numel() // 8 * 8
    return int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum(dtype=torch.int64))


def _plain(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    kept = {
        key: one for key, one in values.items() if isinstance(one, bool | int | float | str | tuple | None)
    }
    return sorted(kept.items())
