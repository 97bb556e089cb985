"""What flows back into the outputs of all rows, known before the pass that sends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from anybatch.core import LossError, Number, all_finite
from anybatch.precision import FIRST_SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """The gradient of a loss with respect to the outputs of all rows, and to parameters of its own.

    Attributes:
        value: the loss, a scalar.
        weight: what is reported as its weight.
        rows: how many rows there are.
        outputs: what the first pass saw: one entry per row in the first axis, or scalars that all rows share.
        cotangents: the gradient with respect to each of them, of the same shape; None where there is none.
        parameters: those that the loss itself depends on, each with its gradient.

    Example:
        >>> output = torch.ones(3, requires_grad=True)
        >>> pull = Pull(
        ...     value=torch.tensor(6.0), weight=3, rows=3, outputs=(torch.ones(3),),
        ...     cotangents=(torch.tensor([1.0, 2.0, 3.0]),),
        ... )
        >>> pull.into([output[:2]], 0, 2).backward()
        >>> output.grad
        tensor([1., 2., 0.])
    """

    value: Tensor
    weight: Number
    rows: int
    outputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    parameters: tuple[tuple[Tensor, Tensor], ...] = ()
    # How far the second pass is from the first, where it has come to.
    _drifts: list[Tensor] = field(default_factory=list[Tensor], init=False, repr=False)

    def into(self, outputs: Sequence[Tensor], start: int, stop: int) -> Tensor:
        """A scalar whose backward sends into the outputs of these rows what belongs to them.

        What belongs to no row (a scalar output, a parameter of the loss) is sent with the first rows, once;
        so is the value: the scalars of all micro-batches add up to the loss.

        Args:
            outputs: those of rows `start` to `stop`, with their graph.
            start: the first of these rows.
            stop: the one after the last.
        """
        sent = [
            (output, flow[start:stop] if flow.dim() else flow)
            for output, flow in zip(outputs, self.cotangents, strict=True)
            if flow is not None and output.requires_grad and (flow.dim() or not start)
        ]
        if not start:
            sent.extend(self.parameters)
        value = torch.zeros_like(self.value) if start else self.value
        if not sent:
            return value
        targets, flows = zip(*sent, strict=True)
        return cast("Tensor", _Send.apply(value, flows, *targets))

    def check(self, outputs: Sequence[Tensor], start: int, stop: int) -> None:
        """Note how far the outputs are from those of the first pass; with the last rows, look.

        Raises:
            LossError: the second pass did not repeat the first.
        """
        before = [output[start:stop] if output.dim() else output for output in self.outputs]
        shapes = [tuple(output.shape) for output in outputs]
        if shapes != [tuple(output.shape) for output in before]:
            raise _not_repeated(f"shapes {shapes} where there were {[tuple(one.shape) for one in before]}")
        if torch.is_grad_enabled():  # in an evaluation nothing is sent
            self._drifts.extend(map(_drift, outputs, before))
        if stop == self.rows and self._drifts:
            drift = max(torch.stack(self._drifts).tolist())  # one stop of the device for all rows
            if not drift <= 1:
                raise _not_repeated(f"outputs {drift:.3g} times as far apart as rounding may leave them")


_FALL = 16  # how much smaller the next scale is: float16 has room, and each one is a backward of the loss


def flows_of(value: Tensor) -> dict[Tensor, Tensor]:
    """The gradient with respect to every leaf the value depends on: outputs, and parameters wherever held.

    Where float16 is on the way it is taken at a scale at which nothing vanishes, and is float32 without it.

    Example:
        >>> x = torch.ones(2, dtype=torch.float16, requires_grad=True)
        >>> flows_of((x * 1e-6).sum() * 1e-3)[x].dtype
        torch.float32
    """
    nodes = [value.grad_fn] if value.grad_fn is not None else []
    seen = set(nodes)
    leaves: list[Tensor] = [] if nodes or not value.requires_grad else [value]
    for node in nodes:  # which grows meanwhile
        if hasattr(node, "variable"):
            leaves.append(cast("Any", node).variable)
        fresh = [one for one, _ in node.next_functions if one is not None and one not in seen]
        nodes += fresh
        seen.update(fresh)
    if not leaves:  # nothing flows; whether that may be is the step's to say
        return {}
    scale = FIRST_SCALE if _is_in_float16([value, *leaves]) else 1.0
    while scale > 1:
        found = torch.autograd.grad(value, leaves, torch.full_like(value, scale), retain_graph=True)
        # Some are one number, seen many times.
        found = [one if one.is_sparse else one.contiguous() for one in found]
        if all_finite(found):
            wide = [torch.promote_types(one.dtype, torch.float32) for one in found]
            return {leaf: one.to(to) / scale for leaf, one, to in zip(leaves, found, wide, strict=True)}
        del found  # before the next ones are made
        scale /= _FALL
    return dict(zip(leaves, torch.autograd.grad(value, leaves), strict=True))


def _is_in_float16(tensors: Sequence[Tensor]) -> bool:
    """Whether small gradients would vanish on their way."""
    kinds = {tensor.device.type for tensor in tensors}
    autocast = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return torch.float16 in autocast | {tensor.dtype for tensor in tensors}


class _Send(torch.autograd.Function):
    """A number whose backward sends what is known already, times the cotangent that comes in."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, flows: tuple[Tensor, ...], *targets: Tensor) -> Tensor:
        ctx.flows = flows
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, None, *[flow * gradient for flow in ctx.flows]


def _drift(output: Tensor, first: Tensor) -> Tensor:
    """Distance of two passes in units of what rounding, and kernels that add in any order, may leave."""
    output = output.detach()
    if not (first.is_floating_point() or first.is_complex()):
        return (output != first).any() * 2.0
    output, first = output.nan_to_num(), first.nan_to_num()
    wide = torch.promote_types(first.dtype, torch.float32)
    distance = (output.to(wide) - first).norm()
    return distance / (4 * torch.finfo(first.dtype).eps ** 0.5 * first.to(wide).norm()).clamp(min=1e-30)


def _not_repeated(got: str) -> LossError:
    return LossError(
        f"Expected the second pass of a whole-batch loss to repeat the first, got {got}. Draw random numbers "
        "from torch's, Python's or NumPy's global streams, which are replayed, not from a generator of the "
        "model's own; and keep what a forward changes in buffers, which are put back."
    )
