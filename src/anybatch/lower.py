"""A model whose weights are stored short: cast where values enter and leave, parts of it left in float32."""

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.errors import PlanError
from anybatch.integrations.torchao import refuse_without_float8, with_float8_linear
from anybatch.masters import Masters
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

    Example:
        >>> at_work(nn.Linear(2, 1), "fp16-mixed", []).scale.value
        65536.0
    """
    chosen, known = find(precision), list(optimizers)
    masters = lower(model, chosen, [p for one in known for g in one.param_groups for p in g["params"]])
    for one in known:
        masters.keep_states(one)
    return Working(precision=chosen, masters=masters, scale=LossScale(chosen))


def lower(model: nn.Module, precision: Precision, trained: Iterable[nn.Parameter]) -> Masters:
    """Bring a model into a precision, in place; nothing happens to it where that leaves it as it is.

    Weights and buffers are stored short, all but those of parts that stay in float32, and the model takes and
    gives what it did before: hooks cast what enters to the short dtype and what leaves to float32. The hooks
    stay, so the model can be called by anybody afterwards. Under autocast only the parts that stay in float32
    get hooks.

    Args:
        model: changed in place.
        precision: what is asked for.
        trained: parameters of the optimizers, whose float32 weights are kept.

    Returns:
        The float32 weights behind those that are stored short.

    Raises:
        PlanError: a pattern that no module matches, or a weight shared by parts of two precisions; nothing
            is changed.

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
    if precision.compute == "float8":
        refuse_without_float8(model)
        with_float8_linear(model, inside)
    if precision.is_mixed:
        for module in kept:
            if not isinstance(module, BatchNorm):  # autocast knows it
                _hook(module, Outside())
        return masters
    dtype = cast("torch.dtype", precision.storage)
    short = [module for module in model.modules() if module not in inside]
    _refuse_shared(model, short, inside)
    if model not in inside:
        ours = set(trained)
        weights = dict.fromkeys(p for module in short for p in module.parameters(recurse=False))
        like = next((p for p in weights if p.is_floating_point()), None)
        for parameter in weights:
            _shorten(parameter, dtype, masters if parameter in ours else None)
        for module in short:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)  # pyright: ignore[reportPrivateUsage]
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        if like is not None:
            for module in kept:
                _hook(module, Within(like))
            _hook(model, Around(like))
    return masters


class Around:
    """Hooks of a model that is stored short: what enters is cast to its dtype, what leaves to float32.

    Args:
        like: one of its weights; whatever dtype it has when the model is called is the model's.
    """

    def __init__(self, like: nn.Parameter) -> None:
        self._like = like

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        return _mapped((args, kwargs), self._inwards)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After it."""
        return _mapped(output, _lengthened)

    def _inwards(self, value: Tensor) -> Tensor:
        return value.to(self._like.dtype) if value.is_floating_point() else value


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


def _hook(module: nn.Module, hooks: Around | Within | Outside) -> None:
    """Put hooks on a module, unless another step has done so."""
    found = module._forward_hooks.values()  # pyright: ignore[reportPrivateUsage]
    if any(isinstance(getattr(one, "__self__", None), type(hooks)) for one in found):
        return
    module.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
    always = isinstance(hooks, Outside)
    module.register_forward_hook(hooks.leave, with_kwargs=True, always_call=always)


def _shorten(parameter: nn.Parameter, dtype: torch.dtype, masters: Masters | None) -> None:
    if not parameter.is_floating_point():
        return
    full = parameter.data
    parameter.data = full.to(dtype)
    if masters is not None:  # what is short already has no more digits than it shows
        masters.hold(parameter, full.float() if full.dtype in SHORT_DTYPES else full)


def _kept(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """The outermost modules that stay in float32."""
    matched: dict[str, bool] = dict.fromkeys(precision.keep_float32, False)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        patterns = [p for p in matched if fnmatchcase(name, p) or type(module).__name__ == p]
        matched.update(dict.fromkeys(patterns, True))
        inner = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if (patterns or isinstance(module, BatchNorm)) and not inner:
            found[name] = module
    missing = [pattern for pattern, is_matched in matched.items() if not is_matched]
    if missing:
        raise PlanError(
            f"Expected keep_float32 to name modules of the {type(model).__name__} or their classes, got "
            f'{missing}, which match none. Take names from model.named_modules(), as in "*.norm*".'
        )
    return list(dict.fromkeys(found.values()))


def _refuse_shared(model: nn.Module, short: list[nn.Module], kept: set[nn.Module]) -> None:
    in_short = {p for module in short for p in module.parameters(recurse=False)}
    names = {p: name for name, p in model.named_parameters()}
    shared = [names[p] for module in kept for p in module.parameters(recurse=False) if p in in_short]
    if shared:
        raise PlanError(
            f"Expected parts that stay in float32 to share no weight with the others, got {shared[:3]}. Name "
            "both modules in keep_float32, or neither."
        )


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
