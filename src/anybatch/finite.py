"""Whether numbers are finite, asked of many tensors at once; gradients that wait until that was asked."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class NonFinite(Exception):  # noqa: N818
    """A micro-batch gave values that are not finite; whoever runs it mends that, or says so in words.

    Attributes:
        where: "loss" or "gradient".
    """

    def __init__(self, where: str) -> None:
        super().__init__(f"the {where} is not finite")
        self.where = where


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every number is finite: one pass, and one stop of each device however many tensors there are.

    Example:
        >>> all_finite([torch.ones(2), torch.zeros(1).half()]), all_finite([torch.tensor([1.0, torch.nan])])
        (True, False)
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):  # as a term that counts
            continue
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.is_complex() or values.requires_grad:
            values = (
                torch.view_as_real(values.detach().resolve_conj()) if values.is_complex() else values.detach()
            )
        kinds.setdefault((values.device, values.dtype), []).append(values)
    found: dict[torch.device, Tensor] = {}
    for (device, _), alike in kinds.items():
        flag = found.setdefault(device, torch.zeros(1, dtype=torch.float32, device=device))
        one = torch.ones(1, dtype=torch.float32, device=device)
        # What torch's GradScaler looks with. It multiplies, too: by 1, which changes nothing.
        torch._amp_foreach_non_finite_check_and_unscale_(alike, flag, one)  # pyright: ignore
    # Asked so that 1 is good news, because that is what a traced step is told.
    return all((flag == 0).item() for flag in found.values())


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
        return all_finite([*[one for _, gradients in self.banks.values() for one in gradients], *others])

    def clear(self) -> None:
        """Let go of them."""
        self.banks.clear()
        self.nbytes = 0
