"""Hooks of a model in two precisions: cast where values enter and leave it, and parts of it in float32."""

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.digits import Digits
from anybatch.stalled import Marks, Stalled
from anybatch.total import SHORT_DTYPES
from anybatch.tree import mould, parts


class Around:
    """Hooks of a model that is stored short: what enters is cast to its dtype, what leaves to float32.

    Only of the outermost such model that runs; one inside of it takes and gives what is short. What the
    model gives just as it was given, or as its last part in float32 gave it, was never rounded.

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
        if not value.is_floating_point():
            return value
        running = _NEST.outermost()
        dtype = self._like.dtype
        return value.to(dtype) if running is None else running.given.shortened(value, dtype)


class _Running:
    """A model that runs; the outermost one knows what was rounded on the way.

    Attributes:
        hooks: of the model.
        frame: that called it.
        has_grad: whether gradients were on when it began.
        given: the digits behind what it was given.
        last: those behind what its last part in float32 gave.
        before: how its buffers stood, where somebody looks.
    """

    def __init__(self, hooks: Around, frame: FrameType) -> None:
        self.hooks, self.frame, self.has_grad = hooks, frame, torch.is_grad_enabled()
        self.given, self.last = Digits(), Digits()
        self.before: Marks = {}

    def outwards(self, value: Tensor) -> Tensor:
        """What leaves the model, in float32."""
        if value.dtype not in SHORT_DTYPES:
            return value
        known = [digits.behind(value) for digits in (self.last, self.given)]
        return next((full for full in known if full is not None), value).float()


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

#: Behind what a part in float32 took, as long as that lives: a block that runs again in backward, perhaps in
#: another thread, takes the same.
_TAKEN = Digits()


class Within:
    """Hooks of a part that stays in float32 inside a model that is stored short: the other way round.

    What the model was given it takes as that was, not rounded.
    """

    def __init__(self, like: nn.Parameter) -> None:
        self._like = like

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        running = _NEST.outermost()
        if running is not None:
            running.last.forget()
        return mapped((args, kwargs), partial(_inwards, running))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After it."""
        return mapped(output, partial(self._outwards, _NEST.outermost()))

    def _outwards(self, running: _Running | None, value: Tensor) -> Tensor:
        if self._like.dtype not in SHORT_DTYPES or value.dtype != torch.float32:
            return value
        if running is None:
            return value.to(self._like.dtype)
        return running.last.shortened(value, self._like.dtype)


def _inwards(running: _Running | None, value: Tensor) -> Tensor:
    """What enters a part in float32."""
    if value.dtype not in SHORT_DTYPES or torch.compiler.is_compiling():
        return lengthened(value)
    full = None
    if running is None:
        full = _TAKEN.behind(value) if torch.is_grad_enabled() else None
    # A checkpoint of torch's older kind runs blocks without gradients first, and then on other tensors.
    elif torch.is_grad_enabled() == running.has_grad:
        full = running.given.behind(value)
        if full is not None and running.has_grad:
            _TAKEN.note(value, full)
    return (value if full is None else full).float()


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
    """Those that called this, from the innermost outwards, beginning with who called the hook."""
    frame = inspect.currentframe()
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[3:]  # not this one, nor `_Nest.enter`, nor the hook


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
