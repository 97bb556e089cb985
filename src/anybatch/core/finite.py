"""Whether numbers are finite, asked of many tensors at once; gradients that wait until that was asked."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from anybatch.core import torch_private as private


class NonFinite(Exception):  # noqa: N818
    """A micro-batch gave values that are not finite; whoever runs it mends that, or says so in words.

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
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            dtype = tensor.dtype
            if dtype not in _REAL or tensor.layout is not _STRIDED or tensor.is_neg():
                if not (dtype.is_floating_point or dtype.is_complex):  # as a term that counts
                    continue
                tensor = _values(tensor)
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        flags, self._flags = self._flags, {}  # not kept if something is found: nothing takes that away again
        for (device, _), alike in kinds.items():
            if device not in flags:
                one = torch.ones(1, dtype=torch.float32, device=device)
                flags[device] = torch.zeros_like(one), one
            # What torch's GradScaler looks with. It multiplies, too: by 1, which changes nothing.
            private.check_finite_(alike, *flags[device])
        if any(flags[device][0].item() for device in {device for device, _ in kinds}):
            return False
        self._flags = flags
        return True


_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_STRIDED = torch.strided


def _values(tensor: Tensor) -> Tensor:
    """The same numbers, as plain ones."""
    values = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach()
    values = values.resolve_conj().resolve_neg()
    return torch.view_as_real(values) if values.is_complex() else values


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite; see `Look.are_finite`.

    Example:
        >>> all_finite([torch.ones(2), torch.zeros(1).half()]), all_finite([torch.tensor([1.0, torch.nan])])
        (True, False)
    """
    return Look().are_finite(tensors)


class Waiting:
    """Finished gradients that nobody has looked at yet.

    Attributes:
        banks: parameters and their gradients, in the same order, by the name of the bank they are for.
        nbytes: of those that were put.

    Example:
        >>> waiting, weight = Waiting(), nn.Parameter(torch.ones(2))
        >>> waiting.put("loss", weight, torch.tensor([1.0, torch.inf]))
        >>> waiting.nbytes, waiting.are_finite()
        (8, False)
    """

    def __init__(self) -> None:
        self.banks: dict[str, tuple[list[nn.Parameter], list[Tensor]]] = {}
        self.nbytes = 0
        self._look = Look()

    def put(self, bank: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """One more."""
        parameters, gradients = self.banks.setdefault(bank, ([], []))
        parameters.append(parameter)
        gradients.append(gradient)
        self.nbytes += gradient.nbytes if not gradient.is_sparse else 0

    def gather(self, bank: str, candidates: Iterable[nn.Parameter]) -> None:
        """Take `.grad` of those that have one, after backward."""
        parameters, gradients = self.banks.setdefault(bank, ([], []))
        for parameter in candidates:
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
                parameters.append(parameter)
                gradients.append(gradient)

    def are_finite(self, others: Sequence[Tensor] = ()) -> bool:
        """Whether all of them are, and others with them."""
        held = [one for _, gradients in self.banks.values() for one in gradients]
        return self._look.are_finite([*held, *others])

    def take(self) -> dict[str, tuple[list[nn.Parameter], list[Tensor]]]:
        """All of them; none waits any more."""
        banks, self.banks, self.nbytes = self.banks, {}, 0
        return banks
