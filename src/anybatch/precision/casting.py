"""Hooks of a model in two precisions: cast where values enter and leave it, and parts of it in float32."""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES, mould, parts
from anybatch.precision.stalled import Marks, Stalled


class Around:
    """Hooks of a model that is stored short: what enters is cast to its dtype, what leaves to float32.

    Only of the outermost such model that runs; one inside of it takes and gives what is short. What the
    model gives just as its last part in float32 gave it was never rounded.

    Args:
        like: one of its weights; whatever dtype it has when the model is called is the model's.
    """

    def __init__(self, like: nn.Parameter) -> None:
        self._like, self._stalled = like, Stalled()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        outer = _NEST.enter(self)
        running = _NEST.outermost()
        if outer is None and running is not None:
            running.before = self._stalled.before(module)
        return mapped((args, kwargs), self._inwards if outer is None else partial(_as_short_as, self._like))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After it, also after an error."""
        outer, ended = _NEST.leave(self)
        if ended is not None and output is not None:  # no error
            self._stalled.after(module, ended.before)
        if outer is not None:
            return mapped(output, partial(_as_short_as, outer._like))
        return mapped(output, lengthened if ended is None else ended.outwards)

    def _inwards(self, value: Tensor) -> Tensor:
        return value.to(self._like.dtype) if value.is_floating_point() else value


class _Running:
    """A model that runs.

    Attributes:
        hooks: of the model.
        frame: that called it.
        before: how its buffers stood, where somebody looks.
        last: what its last part in float32 gave: short tensors, how they stood, and what they were cast from.
    """

    def __init__(self, hooks: Around, frame: FrameType) -> None:
        self.hooks, self.frame = hooks, frame
        self.before: Marks = {}
        self.last: list[tuple[ref[Tensor], object, Tensor]] = []

    def shortened(self, full: Tensor, dtype: torch.dtype) -> Tensor:
        """What a part in float32 gives, for what comes next; itself is given out if nothing does."""
        short = full.to(dtype)
        self.last.append((ref(short), _version(short), full))
        return short

    def outwards(self, value: Tensor) -> Tensor:
        """What leaves the model, in float32."""
        for weak, version, full in self.last:
            if weak() is not value or version != _version(value) or _is_awaited(value):
                continue
            # A block under a checkpoint gives what has no graph yet, and gets one afterwards. In inference
            # nobody counts who writes to a tensor.
            is_it = full.requires_grad == value.requires_grad
            if is_it and (not value.is_inference() or torch.equal(full.to(value.dtype), value)):
                return full
        return lengthened(value)


class _Nest(threading.local):
    """The models stored short that run in this thread, each inside of the one before it."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    def enter(self, hooks: Around) -> Around | None:
        """One begins; the one that it is inside of."""
        outer, _ = self.leave(hooks)
        if torch.compiler.is_compiling():  # no frames there, and an error would leave it running
            return outer
        # An interrupt, unlike an error, calls no hooks: what it has left is not among our callers.
        frames = _frames()
        self._running = [one for one in self._running if one.frame in frames]
        outer = self._running[-1].hooks if self._running else None
        self._running.append(_Running(hooks, frames[0]))
        return outer

    def leave(self, hooks: Around) -> tuple[Around | None, _Running | None]:
        """One ends; the one that it was inside of, and itself if it was running."""
        ended = None
        for index, one in enumerate(self._running):
            if one.hooks is hooks:
                ended = one
                del self._running[index:]
                break
        return (self._running[-1].hooks if self._running else None), ended

    def outermost(self) -> _Running | None:
        """The model that all others run inside of; None where no hook may remember anything."""
        return None if torch.compiler.is_compiling() or not self._running else self._running[0]


_NEST = _Nest()


class Within:
    """Hooks of a part that stays in float32 inside a model that is stored short: the other way round."""

    def __init__(self, like: nn.Parameter) -> None:
        self._like = like

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        running = _NEST.outermost()
        if running is not None:
            running.last.clear()
        return mapped((args, kwargs), lengthened)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After it."""
        return mapped(output, partial(self._outwards, _NEST.outermost()))

    def _outwards(self, running: _Running | None, value: Tensor) -> Tensor:
        if self._like.dtype not in SHORT_DTYPES or value.dtype != torch.float32:
            return value
        if running is None:
            return value.to(self._like.dtype)
        return running.shortened(value, self._like.dtype)


class Outside:
    """Hooks of a part that stays in float32 under autocast: inside of it there is none."""

    def __init__(self) -> None:
        self._open: list[Sequence[AbstractContextManager[Any]]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        kinds = {p.device.type for p in module.parameters()} or {"cpu", "cuda"}
        contexts = [torch.autocast(kind, enabled=False) for kind in kinds if torch.is_autocast_enabled(kind)]
        for context in contexts:
            context.__enter__()
        self._open.append(contexts)
        return mapped((args, kwargs), lengthened) if contexts else None

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it, also after an error."""
        for context in reversed(self._open.pop() if self._open else []):
            context.__exit__(None, None, None)


def _frames() -> list[FrameType]:
    """Those that called the hook, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
    found: list[FrameType] = []  # without this frame, which would hold itself, and all that callers hold
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _version(tensor: Tensor) -> object:
    """What changes where somebody writes to a tensor, or puts other memory in its place."""
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return version, tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # under torch.func
        return object()  # which is like no other


def _is_awaited(short: Any) -> bool:
    """Whether somebody waits for the gradient of this very tensor."""
    return bool(short._backward_hooks) or short.retains_grad


def _as_short_as(like: nn.Parameter, value: Tensor) -> Tensor:
    return value.to(like.dtype) if value.dtype in SHORT_DTYPES else value


def lengthened(value: Tensor) -> Tensor:
    """In float32 what is short."""
    return value.float() if value.dtype in SHORT_DTYPES else value


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed; what is no container, or holds none of these, goes through.

    Example:
        >>> mapped({"x": torch.ones(1), "name": "one"}, torch.neg)
        {'x': tensor([-1.]), 'name': 'one'}
    """
    if isinstance(value, Tensor):
        return change(value)
    found = parts(value)
    if found is None:
        return value
    fresh = [mapped(part, change) for part in found]
    # While a model is compiled nobody can tell.
    is_same = not torch.compiler.is_compiling() and all(map(is_, fresh, found))
    return value if is_same else mould(value)(fresh)
