"""Whether numbers are finite, asked of many tensors at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter

import torch
from torch import Tensor

from anybatch.core import torch_private as private


class NonFinite(Exception):  # noqa: N818
    """A micro-batch gave values that are not finite; whoever runs it handles that, or says so in words.

    Attributes:
        where: "loss" or "gradient".
    """

    def __init__(self, where: str) -> None:
        super().__init__(f"the {where} is not finite")
        self.where = where


class Look:
    """Looks at numbers as often as asked, with the two small tensors on each device that it makes once.

    Example:
        >>> look = Look()
        >>> look.are_finite([torch.ones(2)]), look.are_finite([torch.tensor(torch.nan)])
        (True, False)
    """

    def __init__(self) -> None:
        self._flags: dict[torch.device, tuple[Tensor, Tensor]] = {}  # what was found, and 1

    def are_finite(self, tensors: Iterable[Tensor]) -> bool:
        """Whether every number is: one pass, and one stop of each device however many tensors there are."""
        flags, self._flags = self._flags, {}  # not kept if something is found: nothing takes that away again
        kinds = _by_kind([*tensors])
        for (device, _, _), alike in kinds.items():
            if device not in flags:
                one = torch.ones(1, dtype=torch.float32, device=device)
                flags[device] = torch.zeros_like(one), one
            # What torch's GradScaler looks with. It multiplies, too: by 1, which changes nothing.
            private.check_finite_(alike, *flags[device])
        for device in dict.fromkeys(map(_FIRST, kinds)):
            if flags[device][0].item():
                return False
        self._flags = flags
        return True


_Kind = tuple[torch.device, torch.dtype, torch.layout]
_KIND: Callable[[Tensor], _Kind] = attrgetter("device", "dtype", "layout")
_FIRST = itemgetter(0)
_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _by_kind(tensors: Sequence[Tensor]) -> Mapping[_Kind, Sequence[Tensor]]:
    """Tensors that can be looked at in one go, as plain real ones; integers are left out."""
    kinds = {*map(_KIND, tensors)}
    if len(kinds) == 1 and not any(map(Tensor.is_neg, tensors)):  # nearly all
        (kind,) = kinds
        if kind[1] in _REAL and kind[2] is torch.strided:
            return {kind: tensors}
    found: dict[_Kind, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            plain = _values(tensor)
            found.setdefault(_KIND(plain), []).append(plain)
    return found


def _values(tensor: Tensor) -> Tensor:
    """The same numbers, as plain ones."""
    values = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach()
    values = values.resolve_conj().resolve_neg()
    return torch.view_as_real(values) if values.is_complex() else values


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite; see `Look.are_finite`."""
    return Look().are_finite(tensors)
