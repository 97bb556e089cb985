"""What must be equal on all ranks, as a few short hashes: model, weights, optimizer, loss and options"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import PlanError
from anybatch.core import torch_private as private
from anybatch.engine import Plan, Task

_ADVICE = {
    "weights": "Set the same seed before the model is made, or load the same checkpoint, on every rank",
    "model": "Make the same model, with the same parameters trained, on every rank",
}


def fingerprint(task: Task, settings: Plan, compression: object) -> dict[str, str]:
    """A short hash of each part of a step that must not differ between ranks. Micro-batch sizes may."""
    names = task.names()
    options = [(type(one).__name__, *map(_plain, one.param_groups)) for one in task.optimizers]
    plan = dataclasses.asdict(settings) | {"cut": (), "micro_batch": 0, "blocks": ()}
    settings_of: Mapping[str, Any] = getattr(task.loss, "settings", {})  # of torch's losses
    return {
        "torch": torch.__version__,
        "model": _hash([(names[p], tuple(p.shape), str(p.dtype)) for p in task.parameters]),
        "weights": _hash([_checksum(p) for p in (*task.parameters, *task.model.parameters())]),
        "optimizer": _hash(options),
        "schedulers": _hash([(type(one).__name__, _plain(one.state_dict())) for one in task.schedulers]),
        "loss": _hash([type(task.loss).__name__, *task.loss.coefficients.items(), *_plain(settings_of)]),
        "options": _hash(sorted(plan.items(), key=str)),
        "compression": _hash([type(compression).__name__, *_plain(getattr(compression, "__dict__", {}))]),
        "updates": str(task.progress.updates),
    }


def refuse_differences(found: Sequence[Mapping[str, str]]) -> None:
    """Refuse fingerprints that are not the same on all ranks, with a PlanError that names what differs."""
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
    """Changes with each write to a tensor, also one through `.data`, which has no version."""
    held = [*tensors]
    sums = [_checksum(one) if one.layout is torch.strided else 0 for one in held]
    return [*zip(private.versions(held), sums, strict=True)]


def _checksum(value: Tensor) -> int:
    """The sum of all words of 8 bytes: the same bits give the same number on any device."""
    flat = value.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if not flat.numel():
        return 0
    raw = flat.view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    words = raw.numel() // 8 * 8
    return int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum(dtype=torch.int64))


def _plain(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings among some values: numbers, strings, and what is made of them."""
    kept = {
        key: one for key, one in values.items() if isinstance(one, bool | int | float | str | tuple | None)
    }
    return sorted(kept.items())
