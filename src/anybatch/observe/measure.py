"""Sizes of many tensors at once, in float64, with one synchronization per device."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from anybatch.core import accelerator, torch_private as private, whole

Table = Mapping[str, Sequence[float]]  # numbers by name


def sizes_of(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sum of absolute values, 2-norm, largest absolute value and nonzero count of each, shape (4,)."""
    found: dict[str, Tensor] = {}
    for names, values, wide in _by_device(gradients):
        sums = private.foreach_norm(values, 1, dtype=wide)
        norms = private.foreach_norm(values, 2, dtype=wide)
        largest = private.foreach_norm(values, math.inf, dtype=wide)
        counts = [value.count_nonzero().to(wide) for value in values]
        table = torch.stack([*sums, *norms, *largest, *counts]).view(4, len(names))
        found |= zip(names, table.unbind(1), strict=True)
    return found


def norms_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of each tensor, of shape (1,), on its device; for DTensors a collective."""
    found: dict[str, Tensor] = {}
    for names, values, wide in _by_device(tensors):
        norms = torch.stack(private.foreach_norm(values, 2, dtype=wide))
        found |= zip(names, whole(norms).view(-1, 1), strict=True)
    return found


def _by_device(tensors: Mapping[str, Tensor]) -> Iterable[tuple[list[str], list[Tensor], torch.dtype]]:
    for device in dict.fromkeys([value.device for value in tensors.values()]):
        here = {name: dense(value) for name, value in tensors.items() if value.device == device}
        yield [*here], [*here.values()], accelerator.widest(device)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense real tensor; of a sparse COO tensor only its values."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
        gradient = gradient if gradient.numel() else gradient.new_zeros(1)
    elif gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient.abs() if gradient.is_complex() else gradient


def to_host(*tables: Mapping[str, Tensor]) -> list[Table]:
    """Return the numbers of small one-axis tensors by name, with one synchronization per device."""
    every = [(index, name, one) for index, table in enumerate(tables) for name, one in table.items()]
    found: list[dict[str, list[float]]] = [{} for _ in tables]
    for device in {one.device for *_, one in every}:
        here = [entry for entry in every if entry[2].device == device]
        numbers = iter(torch.cat([one for *_, one in here]).tolist())
        for index, name, one in here:
            found[index][name] = [*islice(numbers, len(one))]
    return [*found]
