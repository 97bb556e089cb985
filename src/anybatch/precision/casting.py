"""Wrappers of modules' forwards that cast between 16 bits and float32."""

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES, accelerator, is_recomputing, mould, parts, torch_private as private


class Wrapper:
    """A callable installed as `module.forward`, at most one per module; it calls the own forward."""

    def __init__(self, module: nn.Module) -> None:
        earlier = cast_of(module)
        self._module = module
        self._own: Any = vars(module).get("forward") if earlier is None else earlier._own

    def put_on(self) -> None:
        """Install the wrapper."""
        vars(self._module)["forward"] = self

    def take_off(self) -> None:
        """Restore the module's own forward."""
        if self._own is None:
            vars(self._module).pop("forward", None)
        else:
            vars(self._module)["forward"] = self._own

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        # Not stored: a copy of a module that holds a bound method cannot be pickled.
        return self._own or partial(type(self._module).forward, self._module)


def cast_of(module: nn.Module) -> Wrapper | None:
    """Return the wrapper installed on a module, or None."""
    found = vars(module).get("forward")
    return found if isinstance(found, Wrapper) else None


class _Running(threading.local):
    """The innermost running 16-bit model of this thread, and the outputs of its last float32 part."""

    def __init__(self) -> None:
        self.around: Outer | None = None
        self.last: list[tuple[Tensor, int, Tensor]] = []


_RUNNING = _Running()


class Outer(Wrapper):
    """The wrapper of a 16-bit model: casts inputs to its dtype and outputs to float32.

    Only the outermost running model casts; models inside take and return 16 bits. An output that is exactly
    an output of the last float32 part is not rounded. `like` is one of the 16-bit weights.
    """

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        super().__init__(module)
        self.like = like
        self._outer: Outer | None = None  # the model around it in the last call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model."""
        outer = _RUNNING.around
        if torch.compiler.is_compiling():  # no state allowed
            return self._run(outer, [], args, kwargs)
        if is_recomputing() and outer is None:
            outer = self._outer
        self._outer, before, _RUNNING.around = outer, _RUNNING.around, self
        try:
            return self._run(outer, _RUNNING.last, args, kwargs)
        finally:
            _RUNNING.around = before
            if before is None:
                _RUNNING.last.clear()

    def _run(self, outer: "Outer | None", last: list[tuple[Tensor, int, Tensor]], *given: Any) -> Any:
        inwards = self._inwards if outer is None else partial(_as_short_as, self.like)
        args, kwargs = mapped(given, inwards)
        return mapped(self._forward(*args, **kwargs), partial(_outwards, outer, last))

    def _inwards(self, value: Tensor) -> Tensor:
        return value.to(self.like.dtype) if value.is_floating_point() else value


def _outwards(outer: Outer | None, last: list[tuple[Tensor, int, Tensor]], value: Tensor) -> Tensor:
    if outer is not None:
        return _as_short_as(outer.like, value)
    for short, version, full in last:
        # torch's reentrant checkpoint adds the graph afterwards. Inference tensors have no version.
        is_it = (
            short is value and full.requires_grad == value.requires_grad and version == private.version(value)
        )
        if is_it and (not value.is_inference() or torch.equal(full.to(value.dtype), value)):
            return full
    return lengthened(value)


class Inner(Wrapper):
    """The wrapper of a float32 module in a 16-bit model: casts inputs to float32, outputs to 16 bits."""

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        super().__init__(module)
        self.like = like

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module."""
        args, kwargs = mapped((args, kwargs), lengthened)
        is_remembered = not torch.compiler.is_compiling() and _RUNNING.around is not None
        if is_remembered:
            _RUNNING.last.clear()
        return mapped(self._forward(*args, **kwargs), partial(self._outwards, is_remembered))

    def _outwards(self, is_remembered: bool, value: Tensor) -> Tensor:
        if self.like.dtype not in SHORT_DTYPES or value.dtype != torch.float32:
            return value
        short = value.to(self.like.dtype)
        if is_remembered:
            _RUNNING.last.append((short, private.version(short), value))
        return short


class AutocastOff(Wrapper):
    """The wrapper of a float32 module under autocast: disables autocast and casts inputs to float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._kinds = {"cpu", accelerator.built() or "cpu"}  # where a module without parameters may run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module."""
        kinds = {p.device.type for p in self._module.parameters()} or self._kinds
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
    """Return a 16-bit tensor in float32, others unchanged."""
    return value.float() if value.dtype in SHORT_DTYPES else value


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest with its tensors changed; parts without tensors stay the same objects."""
    if isinstance(value, Tensor):
        return change(value)
    found = parts(value)
    if found is None:
        return value
    fresh = [mapped(part, change) for part in found]
    # The compiler cannot compare objects.
    is_same = not torch.compiler.is_compiling() and all(map(is_, fresh, found))
    return value if is_same else mould(value)(fresh)
