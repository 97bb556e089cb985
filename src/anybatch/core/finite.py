"""Checks for NaN and infinity, over many tensors at once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from anybatch.core import torch_private as private


class NonFinite(Exception):  # noqa: N818
    """The loss or gradient of a micro-batch is not finite; the executor skips it or raises an error."""

    def __init__(self, where: str) -> None:
        super().__init__(f"the {where} is not finite")
        self.where = where  # "loss" or "gradient"


class Look:
    """A reusable finiteness check; it caches two small tensors on each device."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, tuple[Tensor, Tensor]] = {}  # (found, 1)

    def are_finite(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if all numbers are finite: one pass and one synchronization per device."""
        flags, self._flags = self._flags, {}  # not kept if something is found: nothing resets the flag
        kinds = _by_kind([*tensors])
        for (device, dtype, _), alike in kinds.items():
            if device not in flags:
                one = torch.ones(1, dtype=torch.float32, device=device)
                flags[device] = torch.zeros_like(one), one
            if device.type != "cpu" and dtype not in _SCALED:
                for largest in private.foreach_norm([one for one in alike if one.numel()], math.inf):
                    flags[device][0].add_(~largest.isfinite())
            else:  # the kernel of torch's GradScaler, which also multiplies, here by 1
                private.check_finite_(alike, *flags[device])
        for found, _ in flags.values():
            if found.item():
                return False
        self._flags = flags
        return True


_Kind = tuple[torch.device, torch.dtype, torch.layout]
_KIND = attrgetter("device", "dtype", "layout")
_SCALED = frozenset({torch.float16, torch.float32})  # its CUDA kernel has no bfloat16, and looks in float32
_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _by_kind(tensors: Sequence[Tensor]) -> Mapping[_Kind, Sequence[Tensor]]:
    kinds = {*map(_KIND, tensors)}
    if len(kinds) == 1 and not any(map(Tensor.is_neg, tensors)):  # the usual case
        (kind,) = kinds
        if kind[1] in _REAL and kind[2] is torch.strided:
            return {kind: tensors}
    found: dict[_Kind, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            plain = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach()
            plain = plain.resolve_conj().resolve_neg()
            plain = torch.view_as_real(plain) if plain.is_complex() else plain
            found.setdefault(_KIND(plain), []).append(plain)
    return found


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all numbers are finite; see `Look.are_finite`."""
    return Look().are_finite(tensors)
