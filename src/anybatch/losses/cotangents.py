"""Model outputs of all rows, and the gradient with respect to them, computed before the second pass."""

import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from anybatch.core import (
    LossError,
    Number,
    all_finite,
    ran_out_of_memory,
    takes,
    torch_private as private,
    tree,
)
from anybatch.losses.inputs import TARGET_KEYS, split_batch
from anybatch.precision import FIRST_SCALE


class Seen(NamedTuple):
    """The arguments of a whole-batch loss function for some rows."""

    outputs: tuple[Tensor, ...]  # the tensors that the model returned
    build: tree.Build  # rebuilds the nest of outputs from tensors
    targets: tuple[Any, ...]  # the arguments after the outputs

    @property
    def rows(self) -> int:
        """The size of the first axis of an output that has one."""
        return next((len(output) for output in self.outputs if output.dim()), 1)

    def without_graph(self) -> "Seen":
        """Return detached outputs: leaves that require grad if the outputs did."""
        return self._replace(
            outputs=tuple([one.detach().requires_grad_(one.requires_grad) for one in self.outputs])
        )

    def without_rows(self) -> "Seen":
        """Return outputs and targets of no row."""
        outputs = [
            one.detach()[:0].requires_grad_(one.requires_grad) if one.dim() else one for one in self.outputs
        ]
        return Seen(tuple(outputs), self.build, tree.map_leaves(itemgetter(slice(0)), self.targets))

    def arguments(self) -> tuple[Any, ...]:
        """Return outputs and targets, in the order of the function's arguments."""
        return (*self.build(iter(self.outputs)), *self.targets)


def part(model: nn.Module, micro: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split a micro-batch into the model's inputs and the loss's targets, if there are any."""
    if isinstance(micro, Tensor):
        return micro, ()
    if tree.is_sequence(micro):
        return split_batch(micro, has_target=_last_is_target(model, micro))
    keys = set(micro) if isinstance(micro, Mapping) else set(dir(micro))
    return split_batch(micro, has_target=bool(keys.intersection(TARGET_KEYS)))


def _last_is_target(model: nn.Module, parts: Sequence[Any]) -> bool:
    if len(parts) < 2 or (len(parts) == 2 and isinstance(parts[0], tuple | list | Mapping)):
        return len(parts) == 2
    inner = model
    while isinstance(wrapped := private.compiled_from(inner) or getattr(inner, "module", None), nn.Module):
        inner = wrapped  # compiled, or a wrapper for several devices: its signature takes any arguments
    takes_all = takes(inner.forward, len(parts))
    if takes_all and takes(inner.forward, len(parts) - 1):
        raise LossError(
            f"Expected to see whether the last of {len(parts)} parts goes into the model or is the target, "
            f"got a forward{inspect.signature(inner.forward)} that takes {len(parts) - 1} as well as "
            f"{len(parts)}. Name the parts, "
            "in a dict with the target under 'target', or say it with ab.WholeBatch(function, outputs=...)."
        )
    return not takes_all


def joined(seen: Sequence[Seen]) -> Seen:
    """Return the outputs and targets of several micro-batches, concatenated."""
    outputs: list[Tensor] = []
    for parts in zip(*[one.outputs for one in seen], strict=True):
        if parts[0].dim():
            wanted = any(part.requires_grad for part in parts)
            outputs.append(_concatenated(parts, "outputs").detach().requires_grad_(wanted))
        elif all(torch.equal(part, parts[0]) for part in parts):
            outputs.append(parts[0])
        else:
            raise LossError(
                f"Expected an output without rows to be the same for every micro-batch, got values from "
                f"{min(map(float, parts))} to {max(map(float, parts))}. Return one entry per row."
            )
    nests = [tree.flatten(one.targets) for one in seen]
    targets = zip(*[nest.leaves for nest in nests], strict=True)
    whole = nests[0].build(iter([_concatenated(parts, "targets") for parts in targets]))
    return Seen(tuple(outputs), seen[0].build, whole)


def _concatenated(parts: Sequence[Tensor], what: str) -> Tensor:
    try:
        return torch.cat(list(parts))
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
        raise LossError(
            f"Expected {what} of all rows to differ in their first axis only, got shapes "
            f"{[tuple(part.shape) for part in parts[:4]]}. Pad them to one length in the model or in "
            "`collate`."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """The gradient of a loss with respect to the outputs of all rows, and to its own parameters."""

    value: Tensor  # the loss, a scalar
    weight: Number  # its reported weight
    rows: int  # rows of the batch
    stop: int  # the end of this rank's rows
    outputs: tuple[Tensor, ...]  # of the first pass: one entry per row in the first axis, or shared scalars
    cotangents: tuple[Tensor | None, ...]  # gradient of each output, of the same shape; None for none
    parameters: tuple[tuple[Tensor, Tensor], ...] = ()  # (parameter of the loss, its gradient)
    # Relative distances between the outputs of the two passes so far.
    _drifts: list[Tensor] = field(default_factory=list[Tensor], init=False, repr=False)

    def into(self, outputs: Sequence[Tensor], start: int, stop: int) -> Tensor:
        """Return a scalar whose backward gives the outputs of these rows their gradient.

        The gradient of shared outputs and of the loss's parameters, and the value, come with the first rows.
        Rows that are not of this rank get zeros.
        """
        is_first, sent = start == 0 < self.stop, list[tuple[Tensor, Tensor]]()
        for output, flow in zip(outputs, self.cotangents, strict=True):
            if flow is None or not output.requires_grad:
                continue
            if flow.dim() and start < self.stop:
                flow = flow[start:stop]
            elif not is_first:
                flow = torch.zeros_like(output)
            sent.append((output, flow))
        sent += self.parameters if is_first else ()
        value = self.value if is_first else torch.zeros_like(self.value)
        if not sent:
            return value
        targets, flows = zip(*sent, strict=True)
        return cast("Tensor", _Send.apply(value, flows, *targets))

    def check(self, outputs: Sequence[Tensor], start: int, stop: int) -> None:
        """Record how far outputs are from the first pass; after the last rows raise if they differ."""
        before = [output[start:stop] if output.dim() else output for output in self.outputs]
        shapes = [tuple(output.shape) for output in outputs]
        if shapes != [tuple(output.shape) for output in before]:
            raise _not_repeated(f"shapes {shapes} where there were {[tuple(one.shape) for one in before]}")
        if torch.is_grad_enabled():  # an evaluation has no backward
            self._drifts.extend(map(_drift, outputs, before))
        if stop == self.stop and self._drifts:
            drift = max(torch.stack(self._drifts).tolist())  # one synchronization for all rows
            if not drift <= 1:
                raise _not_repeated(f"outputs {drift:.3g} times as far apart as rounding may leave them")


_FALL = 16  # divisor of the scale after an overflow; each attempt is a backward of the loss


def flows_of(value: Tensor) -> dict[Tensor, Tensor]:
    """Return the gradient of every leaf; with float16 involved it is computed scaled, in float32."""
    is_leaf = value.grad_fn is None and value.requires_grad
    nodes: list[Any] = [node for node in nodes_behind(value.grad_fn) if hasattr(node, "variable")]
    leaves: list[Tensor] = [value] if is_leaf else [node.variable for node in nodes]
    if not leaves:  # no gradient; the step decides if that is allowed
        return {}
    kinds = {one.device.type for one in (value, *leaves)}
    dtypes = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    is_short = torch.float16 in dtypes.union(one.dtype for one in (value, *leaves))
    scale = FIRST_SCALE if is_short else 1.0
    while scale > 1:
        found = torch.autograd.grad(value, leaves, torch.full_like(value, scale), retain_graph=True)
        # Some are expanded from one number.
        found = [one if one.is_sparse else one.contiguous() for one in found]
        if all_finite(found):
            wide = [torch.promote_types(one.dtype, torch.float32) for one in found]
            return {leaf: one.to(to) / scale for leaf, one, to in zip(leaves, found, wide, strict=True)}
        del found  # frees memory before the next attempt
        scale /= _FALL
    return dict(zip(leaves, torch.autograd.grad(value, leaves), strict=True))


def nodes_behind(start: Node | None, stops: Container[Node] = ()) -> Iterator[Node]:
    """Yield every autograd node behind `start` once, nearest first, not past the stops."""
    nodes = [] if start is None else [start]
    seen = set(nodes)
    for node in nodes:  # the list grows during the loop
        yield node
        if node not in stops:
            fresh = {one: None for one, _ in node.next_functions if one is not None and one not in seen}
            nodes += fresh
            seen.update(fresh)


class _Send(torch.autograd.Function):
    """A number whose backward returns known gradients, times the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, flows: tuple[Tensor, ...], *targets: Tensor) -> Tensor:
        ctx.flows = flows
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, None, *[flow * gradient for flow in ctx.flows]


def _drift(output: Tensor, first: Tensor) -> Tensor:
    output = output.detach()
    if not (first.is_floating_point() or first.is_complex()):
        return (output != first).any() * 2.0
    output, first = output.nan_to_num(), first.nan_to_num()
    wide = torch.promote_types(first.dtype, torch.float32)
    distance = (output.to(wide) - first).norm()
    # Relative to a bound on rounding and nondeterministic kernels.
    return distance / (4 * torch.finfo(first.dtype).eps ** 0.5 * first.to(wide).norm()).clamp(min=1e-30)


def _not_repeated(got: str) -> LossError:
    return LossError(
        f"Expected the second pass of a whole-batch loss to repeat the first, got {got}. Draw random numbers "
        "from torch's, Python's or NumPy's global streams, which are replayed, not from a generator of the "
        "model's own; and keep what a forward changes in buffers, which are put back."
    )
