"""A precision applied to a model and its optimizers: 16-bit weights, casts, float32 parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch.batchnorm import BatchNorm
from anybatch.core import SHORT_DTYPES, PlanError, torch_private as private
from anybatch.precision.casting import AutocastOff, Inner, Outer, cast_of, lengthened
from anybatch.precision.loss_scale import LossScale
from anybatch.precision.master_weights import Masters, lengthen, lengthen_states
from anybatch.precision.policy import Precision, find_precision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Working:
    """A precision at work on a model: the float32 master weights, and the loss scale."""

    precision: Precision
    masters: Masters
    scale: LossScale


def at_work(model: nn.Module, precision: str | Precision, optimizers: Iterable[Optimizer]) -> Working:
    """Apply a precision to a model, see `lower`; convert 16-bit state of its optimizers to float32."""
    chosen, known = find_precision(precision), list(optimizers)
    trained = [p for one in known for g in one.param_groups for p in g["params"]]
    short = {parameter for parameter in trained if parameter.dtype in SHORT_DTYPES}
    masters = lower(model, chosen, trained)
    long_now = {parameter for parameter in short if parameter.dtype not in SHORT_DTYPES}
    lengthen_states(known, [p for p in trained if p in long_now or masters.of(p) is not None])
    for one in known:
        masters.keep_states(one)
    return Working(precision=chosen, masters=masters, scale=LossScale(chosen))


def lower(model: nn.Module, precision: Precision, trained: Iterable[nn.Parameter]) -> Masters:
    """Apply a precision to a model, in place, and return the master weights of the `trained` parameters.

    Weights and buffers are stored in 16 bits, except in float32 parts. Inputs and outputs of the model keep
    their dtypes: its `forward` casts inputs to the 16-bit dtype and outputs to float32. Under autocast only
    the `forward` of float32 parts is wrapped. The model may be part of another lowered model, or contain one;
    the last call decides. Only the outermost model that runs in a thread casts (after `outer.compile()` the
    inner ones do, too; `torch.compile(outer)` is safe). A PlanError leaves the model unchanged.
    """
    dtype = precision.storage
    masters = Masters(is_needed=dtype is not None)
    if dtype is None:
        _refuse_stored_short(model, set(trained))
    if not precision.is_short:
        return masters
    kept = _kept(model, precision)
    inside = {part for module in kept for part in module.modules()}
    if dtype is not None:
        _refuse_unshaped(model, inside)
        _refuse_shared(model, inside)
    called = dict.fromkeys(one for module in kept for one in _called(module))
    if dtype is None:
        for module in called:
            if not isinstance(module, BatchNorm):  # autocast handles it
                AutocastOff(module).put_on()
        return masters
    for module in model.modules():
        cast = cast_of(module)
        if module not in called and isinstance(cast, Inner):
            cast.take_off()
    for module in inside:
        for parameter in module.parameters(recurse=False):
            lengthen(parameter)
        for name, buffer in module.named_buffers(recurse=False):
            private.buffers_of(module)[name] = lengthened(buffer)
    if model not in inside:
        _store(model, [one for one in model.modules() if one not in inside], dtype, masters, set(trained))
        like = _first(model, dtype)
        if like is not None:
            for module in called:
                Inner(module, like).put_on()
    return masters


def _store(
    model: nn.Module, short: list[nn.Module], dtype: torch.dtype, masters: Masters, trained: set[nn.Parameter]
) -> None:
    for parameter in dict.fromkeys(p for module in short for p in module.parameters(recurse=False)):
        if parameter in trained and parameter.is_floating_point():
            masters.shorten(parameter, dtype)
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in short:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not _is_frequency(name):
                private.buffers_of(module)[name] = buffer.to(dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
        if module is model or isinstance(cast_of(module), Outer):
            like = _first(module, dtype)
            if like is not None:
                Outer(module, like).put_on()


def _first(module: nn.Module, dtype: torch.dtype) -> nn.Parameter | None:
    return next((parameter for parameter in module.parameters() if parameter.dtype == dtype), None)


def _kept(model: nn.Module, precision: Precision) -> list[nn.Module]:
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
    # 16 bits would freeze running statistics and spoil rotary angles.
    keeps = isinstance(module, private.InstanceNorm) and module.track_running_stats
    own = [name for name, _ in module.named_buffers(recurse=False)]
    turns = any(map(_is_frequency, own)) and not any(True for _ in module.parameters())
    return isinstance(module, BatchNorm) or ((keeps or turns) and precision.store is not None)


def _is_frequency(name: str) -> bool:
    # Frequencies of a rotary embedding: bfloat16 has 8 significant bits, too few for its angles.
    return name.endswith("inv_freq")


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the module, or its children if it has no forward, as a ModuleList."""
    if getattr(module.forward, "__func__", None) is not nn.Module.forward:
        return [module]
    return [one for child in module.children() for one in _called(child)]


def _refuse_stored_short(model: nn.Module, trained: set[nn.Parameter]) -> None:
    # Only a wrapped model was stored in 16 bits by a step; 16-bit weights of the caller may stay.
    lowered = [module for module in model.modules() if isinstance(cast_of(module), Outer)]
    short = {p.dtype for module in lowered for p in module.parameters() if p in trained} & {*SHORT_DTYPES}
    if short:
        raise PlanError(
            "Expected a model that stores its weights as it was made, got one that an earlier step stores in "
            f"{str(short.pop()).removeprefix('torch.')}, where small updates vanish. Bring it back first, "
            "with all the digits that step has: weights = step.masters.state_dict(model); model.float(); "
            "model.load_state_dict(weights)."
        )


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
