"""Forwards of a model in two precisions: cast where values enter and leave it, and parts of it in float32."""

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES, is_recomputing, mould, parts
from anybatch.core import torch_private as private


class Cast:
    """A forward in the place of a module's own, which it calls. A module has at most one."""

    def __init__(self, module: nn.Module) -> None:
        earlier = cast_of(module)
        self._module = module
        self._own: Any = vars(module).get("forward") if earlier is None else earlier._own

    def put_on(self) -> None:
        """Let the module have it."""
        vars(self._module)["forward"] = self

    def take_off(self) -> None:
        """Let the module have its own forward."""
        if self._own is None:
            vars(self._module).pop("forward", None)
        else:
            vars(self._module)["forward"] = self._own

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        # Looked up each time: a copy of a module that holds a bound method cannot be pickled.
        return self._own or partial(type(self._module).forward, self._module)


def cast_of(module: nn.Module) -> Cast | None:
    """The cast that a module has."""
    found = vars(module).get("forward")
    return found if isinstance(found, Cast) else None


class _Nest(threading.local):
    """What runs in this thread: the innermost model stored short, and what its last float32 part gave."""

    def __init__(self) -> None:
        self.around: Around | None = None
        self.last: list[tuple[Tensor, int, Tensor]] = []


_NEST = _Nest()


class Around(Cast):
    """Of a model that is stored short: what enters is cast to its dtype, what leaves to float32.

    Only of the outermost such model that runs; one inside of it takes and gives what is short. What the
    model returns exactly as its last float32 part gave it is not rounded. `like` is one of its weights.
    """

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        super().__init__(module)
        self.like = like
        self._outer: Around | None = None  # the model that it was inside of when last called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model."""
        outer = _NEST.around
        if torch.compiler.is_compiling():  # nothing may be remembered there
            return self._run(outer, [], args, kwargs)
        if is_recomputing() and outer is None:
            outer = self._outer
        self._outer, before, _NEST.around = outer, _NEST.around, self
        try:
            return self._run(outer, _NEST.last, args, kwargs)
        finally:
            _NEST.around = before
            if before is None:
                _NEST.last.clear()

    def _run(self, outer: "Around | None", last: list[tuple[Tensor, int, Tensor]], *given: Any) -> Any:
        inwards = self._inwards if outer is None else partial(_as_short_as, self.like)
        args, kwargs = mapped(given, inwards)
        return mapped(self._forward(*args, **kwargs), partial(_outwards, outer, last))

    def _inwards(self, value: Tensor) -> Tensor:
        return value.to(self.like.dtype) if value.is_floating_point() else value


def _outwards(outer: Around | None, last: list[tuple[Tensor, int, Tensor]], value: Tensor) -> Tensor:
    """What leaves a model: as short as the one around it, or in float32."""
    if outer is not None:
        return _as_short_as(outer.like, value)
    for short, version, full in last:
        # torch's reentrant checkpoint gives a tensor its graph afterwards. Inference tensors have no version.
        is_it = (
            short is value and full.requires_grad == value.requires_grad and version == private.version(value)
        )
        if is_it and (not value.is_inference() or torch.equal(full.to(value.dtype), value)):
            return full
    return lengthened(value)


class Within(Cast):
    """Of a part that stays in float32 inside a model whose weights, such as `like`, are stored short."""

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        super().__init__(module)
        self.like = like

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the part."""
        args, kwargs = mapped((args, kwargs), lengthened)
        is_remembered = not torch.compiler.is_compiling() and _NEST.around is not None
        if is_remembered:
            _NEST.last.clear()
        return mapped(self._forward(*args, **kwargs), partial(self._outwards, is_remembered))

    def _outwards(self, is_remembered: bool, value: Tensor) -> Tensor:
        if self.like.dtype not in SHORT_DTYPES or value.dtype != torch.float32:
            return value
        short = value.to(self.like.dtype)
        if is_remembered:
            _NEST.last.append((short, private.version(short), value))
        return short


class Outside(Cast):
    """Of a part that stays in float32 under autocast, which is off inside of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the part."""
        kinds = {p.device.type for p in self._module.parameters()} or {"cpu", "cuda"}
        found = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        if not found:
            return self._forward(*args, **kwargs)
        args, kwargs = mapped((args, kwargs), lengthened)
        with ExitStack() as stack:
            for kind in found:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return self._forward(*args, **kwargs)


def _as_short_as(like: nn.Parameter, value: Tensor) -> Tensor:
    return value.to(like.dtype) if value.dtype in SHORT_DTYPES else value


def lengthened(value: Tensor) -> Tensor:
    """In float32 what is short."""
    return value.float() if value.dtype in SHORT_DTYPES else value


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with its tensors changed; what holds none stays the object it is."""
    if isinstance(value, Tensor):
        return change(value)
    found = parts(value)
    if found is None:
        return value
    fresh = [mapped(part, change) for part in found]
    # The compiler cannot compare objects.
    is_same = not torch.compiler.is_compiling() and all(map(is_, fresh, found))
    return value if is_same else mould(value)(fresh)
