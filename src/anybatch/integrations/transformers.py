"""Special cases for transformers: router losses of whole batches, and layers that write to a cache."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from anybatch.core import LossError, PlanError, loaded

NAME = "load_balancing_loss_func"
ROUTER_ADVICE = "Set model.config.output_router_logits = False, or do not cut the batch."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterLoss:
    """A call of a model's router loss."""

    function: Any  # the called function of the modeling file
    gates: tuple[Tensor, ...]  # the router's scores of each layer, (tokens, experts)
    mask: Tensor | None  # the attention mask of these tokens, (rows, length); None if all count
    settings: Mapping[str, Any]  # the other arguments
    value: Tensor  # the value that the model received
    node: Node | None  # the autograd node of the value

    def detached(self) -> "RouterLoss":
        """Return the call without its graph."""
        return replace(
            self, gates=tuple([gate.detach() for gate in self.gates]), value=self.value.detach(), node=None
        )


def homes(model: nn.Module) -> list[ModuleType]:
    """Return the modeling files of a model that define a router loss."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    names = sorted({kind.__module__ for kind in kinds})
    files = [file for name in names if (file := loaded(name)) is not None]
    return [file for file in files if callable(vars(file).get(NAME))]


def wants_router_loss(model: nn.Module) -> bool:
    """Return True if a config in the model adds the router loss to its loss."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, "output_router_logits", False) is True for config in configs)


def is_layer(module: nn.Module) -> bool:
    """Return True if transformers marks this module as a layer for gradient checkpointing."""
    return _descends(module, "transformers.modeling_layers", "GradientCheckpointingLayer")


def recomputes_itself(module: nn.Module) -> bool:
    """Return True if transformers' own gradient checkpointing is on in this module."""
    return getattr(module, "gradient_checkpointing", False) is True


def with_empty_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer that will run twice, with a private copy of its cache.

    A model in training makes an empty cache, and no one reads it. But the cache must exist: it determines the
    memory layout of keys and values, and so the matrix product. Filled parts of other layers are replaced by
    tensors of the same shape without memory; empty parts are copied, so that the cache is not kept alive.
    """
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return args, dict(kwargs)
    places = {getattr(one, "layer_idx", None) for one in module.modules()} - {None}
    others: dict[int, Any] = {}
    for cache in filter(_is_cache, (*args, *kwargs.values())):
        for place, layer in _cache_layers(cache):
            held = _holds_tokens(layer)
            if held and places and place not in places:
                others[id(layer)] = _hollow(layer)
            elif held:
                raise PlanError(
                    f"Expected an empty cache in a block that is recomputed, got {held} in that "
                    f'of {type(module).__name__}. Leave it out of `recompute`, or choose "offload".'
                )
    kept = {id(one): one for one in others.values()}

    def empty(value: Any) -> Any:
        return OwnCache(deepcopy(value, dict(others)), kept) if _is_cache(value) else value

    return tuple(map(empty, args)), {name: empty(one) for name, one in kwargs.items()}


def with_own_cache(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a fresh copy of the cache for one run, which may write to it."""

    def own(value: Any) -> Any:
        return deepcopy(value.cache, dict(value.others)) if isinstance(value, OwnCache) else value

    return tuple(map(own, args)), {name: own(one) for name, one in kwargs.items()}


@dataclass(frozen=True, slots=True, eq=False)
class OwnCache:
    """A cache of which every run of a layer gets a copy."""

    cache: Any  # its state at the call of the layer; never written to
    others: Mapping[int, Any]  # parts of other layers, by id


def _cache_layers(cache: Any) -> list[tuple[int, Any]]:
    inner = [pair for part in vars(cache).values() if _is_cache(part) for pair in _cache_layers(part)]
    return [*inner, *enumerate(getattr(cache, "layers", ()))]


def _hollow(layer: Any) -> Any:
    twin = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.new_zeros(()).expand(value.shape))
    return twin


def _holds_tokens(layer: Any) -> str:
    states = getattr(layer, "has_previous_state", False)
    if any(states.values()) if isinstance(states, Mapping) else states is True:
        return "a state"
    length = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0
    return f"{length} tokens" if length else ""


def _is_cache(value: object) -> bool:
    return _descends(value, "transformers.cache_utils", "Cache")


def _descends(value: object, module: str, name: str) -> bool:
    return any(base.__name__ == name and base.__module__ == module for base in type(value).__mro__)


@contextmanager
def recorded(files: Sequence[ModuleType]) -> Generator[list[RouterLoss]]:
    """Return a context that records the calls of these files' router losses, with unchanged values."""
    for file in files:
        _watch(file)
    calls: list[RouterLoss] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


class WholeRouterLoss:
    """The router loss of all rows, from the detached call of each micro-batch, in order."""

    def __init__(self, parts: Sequence[RouterLoss]) -> None:
        first = parts[0]
        if any(part.settings != first.settings or len(part.gates) != len(first.gates) for part in parts):
            raise LossError(
                f"Expected the same router loss in every micro-batch, got {len(first.gates)} layers and "
                f"{dict(first.settings)} in the first and others after it. {ROUTER_ADVICE}"
            )
        if len({part.mask is None for part in parts}) > 1:
            raise LossError(
                "Expected an attention mask in every micro-batch or in none, got "
                f"{sum(part.mask is not None for part in parts)} of {len(parts)}. {ROUTER_ADVICE}"
            )
        self._sizes = [part.gates[0].shape[0] for part in parts]
        layers = zip(*[part.gates for part in parts], strict=True)
        self._gates = tuple(torch.cat(layer).detach().requires_grad_() for layer in layers)
        # All tokens in one row, because separately padded micro-batches differ in length.
        masks = [part.mask.reshape(-1) for part in parts if part.mask is not None]
        mask = {"attention_mask": torch.cat(masks)[None]} if masks else {}
        with torch.enable_grad():
            self.value: Tensor = first.function(gate_logits=self._gates, **first.settings, **mask)
        self._cotangents: list[tuple[Tensor, ...]] = []

    def part(self, index: int, call: RouterLoss, coefficient: float) -> Tensor:
        """Return a micro-batch's share, with the gradient of the whole batch, from its call with graph.

        The first share has the whole value. The coefficient is the router loss's factor in the loss.
        """
        if not self._cotangents:  # the coefficient comes first, as in the model's own backward
            # Keep the graph until this has worked: after an out-of-memory error it runs again.
            cotangents = torch.autograd.grad(
                self.value, self._gates, torch.full_like(self.value, coefficient), retain_graph=True
            )
            self.value = self.value.detach()
            self._cotangents = list(zip(*[one.split(self._sizes) for one in cotangents], strict=True))
        if call.gates[0].shape[0] != self._sizes[index]:
            raise LossError(
                f"Expected the {self._sizes[index]} tokens of the first pass in micro-batch {index}, got "
                f"{call.gates[0].shape[0]}. Make `collate` give the same tensors each time."
            )
        pairs = zip(call.gates, self._cotangents[index], strict=True)
        share = torch.stack([(gate * cotangent).sum() for gate, cotangent in pairs]).sum().double()
        value = self.value.detach().double() * coefficient if index == 0 else 0
        return share - share.detach() + value


# A modeling file looks up its router loss by name at each call, and all threads share the file. So the
# function is replaced once, for good; it records only inside `recorded`, separately for each context.
_CALLS: ContextVar[list[RouterLoss] | None] = ContextVar("router losses", default=None)
_WATCHING = Lock()


def _watch(file: ModuleType) -> None:
    with _WATCHING:
        function = vars(file)[NAME]
        if not hasattr(function, "is_watched_by_anybatch"):
            setattr(file, NAME, _recorder(function))


def _recorder(function: Any) -> Any:
    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        value, calls = function(*args, **kwargs), _CALLS.get()
        noted = None if calls is None else _note(function, args, kwargs, value)
        if calls is None or noted is None:
            return value
        calls.append(noted)
        return noted.value.clone()  # models add to a loss in place

    record.is_watched_by_anybatch = True  # pyright: ignore[reportAttributeAccessIssue]
    return record


def _note(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> RouterLoss | None:
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    settings = dict(bound.arguments)
    gates, mask = settings.pop("gate_logits", None), settings.pop("attention_mask", None)
    if not isinstance(value, Tensor) or not isinstance(gates, tuple) or not gates:
        return None
    tokens = {gate.shape[:-1].numel() if gate.dim() == 2 else -1 for gate in gates}
    if mask is not None:
        tokens.add(mask.numel())
    if len(tokens) > 1 or -1 in tokens or any(isinstance(one, Tensor) for one in settings.values()):
        return None
    return RouterLoss(
        function=function, gates=gates, mask=mask, settings=settings, value=value, node=value.grad_fn
    )
