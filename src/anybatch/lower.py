"""A model whose weights are stored short: cast where values enter and leave, parts of it left in float32."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch.errors import PlanError
from anybatch.integrations.torchao import refuse_without_float8, with_float8_linear
from anybatch.masters import Masters, lengthen, lengthen_states
from anybatch.meetings import BatchNorm
from anybatch.precision import Precision, find
from anybatch.scale import LossScale
from anybatch.total import SHORT_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Working:
    """A precision at work on a model.

    Attributes:
        precision: what was asked for.
        masters: the float32 weights of parameters that are stored short.
        scale: the loss scale.
    """

    precision: Precision
    masters: Masters
    scale: LossScale


def at_work(model: nn.Module, precision: str | Precision, optimizers: Iterable[Optimizer]) -> Working:
    """A precision by name, with the model brought into it; see `lower`. Optimizers load states as they are.

    What they have in 16 bits for weights that they are to update in float32 becomes float32.

    Example:
        >>> at_work(nn.Linear(2, 1), "fp16-mixed", []).scale.value
        65536.0
    """
    chosen, known = find(precision), list(optimizers)
    trained = [p for one in known for g in one.param_groups for p in g["params"]]
    short = {parameter for parameter in trained if parameter.dtype in SHORT_DTYPES}
    masters = lower(model, chosen, trained)
    lengthened = {parameter for parameter in short if parameter.dtype not in SHORT_DTYPES}
    lengthen_states(known, [p for p in trained if p in lengthened or masters.of(p) is not None])
    for one in known:
        masters.keep_states(one)
    return Working(precision=chosen, masters=masters, scale=LossScale(chosen))


def lower(model: nn.Module, precision: Precision, trained: Iterable[nn.Parameter]) -> Masters:
    """Bring a model into a precision, in place; nothing happens to it where that leaves it as it is.

    Weights and buffers are stored short, all but those of parts that stay in float32, and the model takes and
    gives what it did before: hooks cast what enters to the short dtype and what leaves to float32. The hooks
    stay, so the model can be called by anybody afterwards. Under autocast only the parts that stay in float32
    get hooks.

    The model may be part of another that was lowered, or hold one: it is what the last call says of it, and
    casts only where it is the outermost that runs in its thread (`compile()` of the outer one in place does
    not know of it; `torch.compile(outer)` does).

    Args:
        model: changed in place.
        precision: what is asked for.
        trained: parameters of the optimizers, whose float32 weights are kept.

    Returns:
        The float32 weights behind those that are stored short.

    Raises:
        PlanError: a pattern that no module matches, a weight shared by parts of two precisions, or weights
            to be stored short that have no shape yet; nothing is changed.

    Example:
        >>> from anybatch.precision import find
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> masters = lower(model, find("bf16-true"), model.parameters())
        >>> model[0].weight.dtype, model[1].weight.dtype, model(torch.ones(4, 2)).dtype
        (torch.bfloat16, torch.float32, torch.float32)
    """
    masters = Masters(is_needed=precision.store is not None)
    if not precision.is_short:
        return masters
    kept = _kept(model, precision)
    inside = {part for module in kept for part in module.modules()}
    if precision.store is not None:
        _refuse_unshaped(model, inside)
        _refuse_shared(model, inside)
    if precision.compute == "float8":
        refuse_without_float8(model)
        with_float8_linear(model, inside)
    called = dict.fromkeys(one for module in kept for one in _called(module))
    if precision.is_mixed:
        for module in called:
            if not isinstance(module, BatchNorm):  # autocast knows it
                _hook(module, Outside())
        return masters
    dtype = cast("torch.dtype", precision.storage)
    for module in model.modules():
        if module not in called:
            _unhook(module, Within)
    for module in inside:
        for parameter in module.parameters(recurse=False):
            lengthen(parameter)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _lengthened(buffer)  # pyright: ignore[reportPrivateUsage]
    if model not in inside:
        _store(model, [one for one in model.modules() if one not in inside], dtype, masters, set(trained))
        like = _first(model, dtype)
        if like is not None:
            for module in called:
                _hook(module, Within(like))
    return masters


def _store(
    model: nn.Module, short: list[nn.Module], dtype: torch.dtype, masters: Masters, trained: set[nn.Parameter]
) -> None:
    """Store the weights and buffers of some modules short, and cast where the model begins."""
    for parameter in dict.fromkeys(p for module in short for p in module.parameters(recurse=False)):
        if parameter in trained and parameter.is_floating_point():
            masters.shorten(parameter, dtype)
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in short:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)  # pyright: ignore[reportPrivateUsage]
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    for module in short:
        like = _first(module, dtype) if module is model or _keys(_tables(module)[0], Around) else None
        if like is not None:
            _hook(module, Around(like))


def _first(module: nn.Module, dtype: torch.dtype) -> nn.Parameter | None:
    return next((parameter for parameter in module.parameters() if parameter.dtype == dtype), None)


class Around:
    """Hooks of a model that is stored short: what enters is cast to its dtype, what leaves to float32.

    Only of the outermost such model that runs; one inside of it takes and gives what is short.

    Args:
        like: one of its weights; whatever dtype it has when the model is called is the model's.
    """

    def __init__(self, like: nn.Parameter) -> None:
        self._like = like

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        outer = _NEST.enter(self)
        return _mapped((args, kwargs), self._inwards if outer is None else partial(_as_short_as, self._like))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After it, also after an error."""
        outer = _NEST.leave(self)
        return _mapped(output, _lengthened if outer is None else partial(_as_short_as, outer._like))

    def _inwards(self, value: Tensor) -> Tensor:
        return value.to(self._like.dtype) if value.is_floating_point() else value


class _Nest(threading.local):
    """The models stored short that run in this thread, each inside of the one before it."""

    def __init__(self) -> None:
        self._running: list[tuple[Around, FrameType]] = []

    def enter(self, hooks: Around) -> Around | None:
        """One begins; the one that it is inside of."""
        outer = self.leave(hooks)
        if torch.compiler.is_compiling():  # no frames there, and an error would leave it running
            return outer
        # An interrupt, unlike an error, calls no hooks: what it has left is not among our callers.
        frames = _frames()
        self._running = [one for one in self._running if one[1] in frames]
        outer = self._running[-1][0] if self._running else None
        self._running.append((hooks, frames[0]))
        return outer

    def leave(self, hooks: Around) -> Around | None:
        """One ends; the one that it was inside of."""
        for index, (one, _) in enumerate(self._running):
            if one is hooks:
                del self._running[index:]
                break
        return self._running[-1][0] if self._running else None


_NEST = _Nest()


class Within:
    """Hooks of a part that stays in float32 inside a model that is stored short: the other way round."""

    def __init__(self, like: nn.Parameter) -> None:
        self._like = like

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        return _mapped((args, kwargs), _lengthened)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After it."""
        return _mapped(output, self._outwards)

    def _outwards(self, value: Tensor) -> Tensor:
        short = self._like.dtype in SHORT_DTYPES
        return value.to(self._like.dtype) if short and value.dtype == torch.float32 else value


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
        return _mapped((args, kwargs), _lengthened) if contexts else None

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it, also after an error."""
        for context in reversed(self._open.pop() if self._open else []):
            context.__exit__(None, None, None)


def _tables(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks  # pyright: ignore[reportPrivateUsage]


def _keys(table: Mapping[int, Any], kind: type) -> list[int]:
    return [key for key, hook in table.items() if isinstance(getattr(hook, "__self__", None), kind)]


def _hook(module: nn.Module, hooks: Around | Within | Outside) -> None:
    """Put hooks on a module, in the place of those that another step has put there."""
    found = [_keys(table, type(hooks)) for table in _tables(module)]
    if not any(found):
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
        always = not isinstance(hooks, Within)
        module.register_forward_hook(hooks.leave, with_kwargs=True, always_call=always)
    for table, keys, hook in zip(_tables(module), found, (hooks.enter, hooks.leave), strict=True):
        table.update(dict.fromkeys(keys, hook))


def _unhook(module: nn.Module, kind: type) -> None:
    """Take hooks off; they may have come with a copy of the module, so that nobody has their handles."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        for key in _keys(vars(module)[name], kind):
            for flags in (name, f"{name}_with_kwargs"):
                vars(module)[flags].pop(key, None)


def _kept(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """The outermost modules that stay in float32."""
    matched: dict[str, bool] = dict.fromkeys(precision.keep_float32, False)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        patterns = [p for p in matched if fnmatchcase(name, p) or type(module).__name__ == p]
        matched.update(dict.fromkeys(patterns, True))
        inner = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if (patterns or _stays(module, precision)) and not inner:
            found[name] = module
    missing = [pattern for pattern, is_matched in matched.items() if not is_matched]
    if missing:
        raise PlanError(
            f"Expected keep_float32 to name modules of the {type(model).__name__} or their classes, got "
            f'{missing}, which match none. Take names from model.named_modules(), as in "*.norm*".'
        )
    return list(dict.fromkeys(found.values()))


def _stays(module: nn.Module, precision: Precision) -> bool:
    """Whether it is a norm whose statistics would stand still in a short dtype."""
    keeps = isinstance(module, _InstanceNorm) and module.track_running_stats
    return isinstance(module, BatchNorm) or (keeps and precision.store is not None)


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or in the place of one that is never called, such as a ModuleList, what it holds."""
    if getattr(module.forward, "__func__", None) is not nn.Module.forward:
        return [module]
    return [one for child in module.children() for one in _called(child)]


def _refuse_unshaped(model: nn.Module, kept: set[nn.Module]) -> None:
    unshaped = [
        name
        for name, module in model.named_modules()
        if module not in kept and any(map(is_lazy, (*module.parameters(False), *module.buffers(False))))
    ]
    if unshaped:
        raise PlanError(
            f"Expected weights whose shapes are known where they are to be stored short, got {unshaped[:3]}, "
            "which wait for their first rows. Run one forward first, without gradient."
        )


def _refuse_shared(model: nn.Module, kept: set[nn.Module]) -> None:
    short = [module for module in model.modules() if module not in kept]
    in_short = {p for module in short for p in module.parameters(recurse=False)}
    names = {p: name for name, p in model.named_parameters()}
    shared = [names[p] for module in kept for p in module.parameters(recurse=False) if p in in_short]
    if shared:
        raise PlanError(
            f"Expected parts that stay in float32 to share no weight with the others, got {shared[:3]}. Name "
            "both modules in keep_float32, or neither."
        )


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


def _lengthened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in SHORT_DTYPES else value


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed; what is no tuple, list or mapping goes through."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        kind: Any = type(cast("Any", value))
        parts = [_mapped(one, change) for one in cast("Iterable[Any]", value)]
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    if isinstance(value, Mapping):
        known = cast("Mapping[Any, Any]", value)
        changed = {key: _mapped(one, change) for key, one in known.items()}
        if type(known) is dict or not isinstance(known, MutableMapping):
            return changed
        fresh: Any = copy.copy(known)  # keeps the class, such as a ModelOutput
        for key, one in changed.items():
            fresh[key] = one
        return fresh
    return value
