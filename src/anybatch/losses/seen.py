"""What a loss over all rows sees of some of them: outputs with targets, and all of them joined."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from anybatch.core import LossError, ran_out_of_memory, tree
from anybatch.core import torch_private as private
from anybatch.losses.inputs import TARGET_KEYS, split_batch


class Seen(NamedTuple):
    """What the function sees of some rows.

    Attributes:
        outputs: the tensors that the model returned.
        build: puts them back into the nest they came in.
        targets: what follows them.
    """

    outputs: tuple[Tensor, ...]
    build: tree.Build
    targets: tuple[Any, ...]

    @property
    def rows(self) -> int:
        """Entries in the first axis of an output that has one."""
        return next((len(output) for output in self.outputs if output.dim()), 1)

    def without_graph(self) -> "Seen":
        """The same, cut off from the model: leaves that want a gradient where the outputs carried one."""
        return self._replace(
            outputs=tuple([one.detach().requires_grad_(one.requires_grad) for one in self.outputs])
        )

    def arguments(self) -> tuple[Any, ...]:
        """Outputs and targets, in the order in which the function takes them."""
        return (*self.build(iter(self.outputs)), *self.targets)


def part(model: nn.Module, micro: Any) -> tuple[Any, tuple[Any, ...]]:
    """Part a micro-batch into the model's inputs and the loss's targets, if there are any.

    Raises:
        LossError: the last part of a tuple could go either way.

    Example:
        >>> part(nn.Linear(1, 1), (1, 2)), part(nn.Bilinear(1, 1, 1), (1, 2))
        ((1, (2,)), ((1, 2), ()))
    """
    if isinstance(micro, Tensor):
        return micro, ()
    if isinstance(micro, tuple | list):
        return split_batch(micro, has_target=_last_is_target(model, cast("Sequence[Any]", micro)))
    keys = set(micro) if isinstance(micro, Mapping) else set(dir(micro))
    return split_batch(micro, has_target=bool(keys.intersection(TARGET_KEYS)))


def _last_is_target(model: nn.Module, parts: Sequence[Any]) -> bool:
    """Whether the last part of a tuple is a target: told by what the model's forward can take."""
    if len(parts) < 2 or (len(parts) == 2 and isinstance(parts[0], tuple | list | Mapping)):
        return len(parts) == 2
    inner: Any = model
    while isinstance(wrapped := private.compiled_from(inner) or getattr(inner, "module", None), nn.Module):
        inner = wrapped  # compiled, or one of a parallel group: its own signature tells nothing
    signature = inspect.signature(inner.forward)
    takes_all, takes_fewer = _takes(signature, len(parts)), _takes(signature, len(parts) - 1)
    if takes_all and takes_fewer:
        raise LossError(
            f"Expected to see whether the last of {len(parts)} parts goes into the model or is the target, "
            f"got a forward{signature} that takes {len(parts) - 1} as well as {len(parts)}. Name the parts, "
            "in a dict with the target under 'target', or say it with ab.WholeBatch(function, outputs=...)."
        )
    return not takes_all


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def joined(seen: Sequence[Seen]) -> Seen:
    """What was seen micro-batch by micro-batch, as if all rows had been seen at once.

    Raises:
        LossError: they do not fit together.

    Example:
        >>> parts = [Seen((torch.ones(2), torch.tensor(3.0)), tuple, ()) for _ in range(2)]
        >>> joined(parts).outputs
        (tensor([1., 1., 1., 1.]), tensor(3.))
    """
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
