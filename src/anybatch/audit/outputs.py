"""The outputs of a model: heard while its micro-batches run, joined, and returned in place of a forward"""

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import torch_private as private
from anybatch.trial import PLAIN

Axes = Sequence[Sequence[int]]  # of each call of a micro-batch: the axis of rows of each tensor


class Heard:
    """The outputs of the calls of a model, in order, heard by a hook.

    Attributes:
        count: calls so far.
        outputs: the outputs of those that were kept, detached.
        is_full: True if some were not kept, because they would take more than `room` bytes.
    """

    def __init__(self, room: float = math.inf) -> None:
        self._room = room
        self.count, self.is_full = 0, False
        self.outputs: list[Any] = []
        self._handles = list[Any]()

    def listen(self, model: nn.Module) -> "Heard":
        """Hear the calls of a model from now on; not of a compiled one, which a hook would compile anew."""
        if not (isinstance(model, torch.jit.ScriptModule) or private.compiled_call_of(model)):
            # Before other hooks: they run again on what is returned.
            self._handles.append(model.register_forward_hook(self, prepend=True))
        return self

    def stop(self) -> None:
        """Hear no more; again where a failed step has put its hooks back."""
        for handle in self._handles:
            handle.remove()

    def parts(self, count: int) -> list[list[Any]]:
        """Return the outputs of each micro-batch, which has so many calls."""
        return [self.outputs[at : at + count] for at in range(0, len(self.outputs), count)]

    def __enter__(self) -> "Heard":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Keep an output; the hook."""
        if private.is_in_backward():  # where a call is recomputed
            return
        self.count += 1
        if not self.is_full:
            leaves, form = private.pytree.tree_flatten(output)
            self._room -= sum(_nbytes(one) for one in leaves if isinstance(one, Tensor))
            self.is_full = self._room < 0
            if not self.is_full:
                kept = [one.detach().clone() if isinstance(one, Tensor) else one for one in leaves]
                self.outputs.append(private.pytree.tree_unflatten(kept, form))


def _nbytes(tensor: Tensor) -> float:
    return tensor.nbytes if tensor.layout is torch.strided else math.inf  # others are not joined


def axes_of(whole: Heard, rows: Sequence[int], parts: Heard, sizes: Sequence[int]) -> Axes | None:
    """Return the axis of rows of each output, from calls with all rows and with parts of them.

    None if the numbers of calls differ, or if it is not known of some tensor.
    """
    count = whole.count // len(rows)
    if not count or whole.count != count * len(rows) or parts.count != count * len(sizes):
        return None
    found: list[list[int]] = []
    for one, other in zip(whole.outputs[:count], parts.outputs[-count:], strict=True):
        pair = [
            [x for x in private.pytree.tree_leaves(each) if isinstance(x, Tensor)] for each in (one, other)
        ]
        places = [_axes(a.shape, rows[0], b.shape, sizes[-1]) for a, b in zip(*pair, strict=False)]
        if len(pair[0]) != len(pair[1]) or any(len(axes) != 1 for axes in places):
            return None
        found.append([axes[0] for axes in places])
    return found


def _axes(whole: torch.Size, rows: int, part: torch.Size, few: int) -> list[int]:
    pairs = enumerate(zip(whole, part, strict=False))
    return [at for at, (a, b) in pairs if a != b and a * few == b * rows and not a % rows]


def joined(calls: Sequence[Sequence[Any]], axes: Axes) -> list[Any] | None:
    """Return the outputs of each call of all rows, from those of micro-batches; None if they do not fit."""
    found: list[Any] = []
    for outputs, places in zip(zip(*calls, strict=True), axes, strict=True):
        flat = [private.pytree.tree_flatten(one) for one in outputs]
        tensors = [[x for x in leaves if isinstance(x, Tensor)] for leaves, _ in flat]
        others = [[x for x in leaves if not isinstance(x, Tensor)] for leaves, _ in flat]
        if any(form != flat[0][1] for _, form in flat) or not all(map(_are_same, others, repeat(others[0]))):
            return None
        try:
            whole = [torch.cat(each, at) for each, at in zip(zip(*tensors, strict=True), places, strict=True)]
        except (RuntimeError, ValueError):  # other lengths, another number of tensors
            return None
        left = iter(whole)
        leaves = [next(left) if isinstance(one, Tensor) else one for one in flat[0][0]]
        found.append(private.pytree.tree_unflatten(leaves, flat[0][1]))
    return found


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True for the same objects, or equal numbers and strings; others may compare in their own way."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b or (type(a) in PLAIN and a == b) for a, b in pairs)


class RanInside(Exception):  # noqa: N818
    """Raised where a loss runs a network itself: one inside the model, or a teacher, on all rows at once."""


@contextmanager
def returning(model: nn.Module, outputs: Iterable[Any]) -> Generator[None]:
    """Return these outputs from the model, one for each call, in place of its forward."""
    left, inner = iter(outputs), {*model.modules()} - {model}

    def own(value: Any) -> Any:  # a loss may write to it, and ask for its gradient
        if not isinstance(value, Tensor):
            return value
        return value.requires_grad_(value.is_floating_point() and torch.is_grad_enabled()).clone()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return private.pytree.tree_map(own, next(left, None))

    def refuse(module: nn.Module, args: Any) -> None:
        is_network = module is not model and [*module.children()] and [*module.parameters()]
        if module in inner or is_network:
            raise RanInside(f"the loss calls {type(module).__name__}")

    held, handle = vars(model), nn.modules.module.register_module_forward_pre_hook(refuse)
    before = held.get("forward")
    held["forward"] = forward
    try:
        yield
    finally:
        handle.remove()
        del held["forward"]
        if before is not None:
            held["forward"] = before
