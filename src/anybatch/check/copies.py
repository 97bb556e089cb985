"""Copies of model and loss to test, in float64 if they run in it; the originals are restored"""

import copy
import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.core import PlanError, torch_private as private
from anybatch.losses import module_of
from anybatch.state import ObjectState, rng

_COPIED = (Tensor, nn.Module, FunctionType, partial, list, dict, set)


class Copied:
    """A deep copy of model and loss, converted to `dtype` unless it is None; passes share its parameters."""

    def __init__(self, model: nn.Module, loss: object, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        memo: dict[int, Any] = {}
        try:
            self._model: nn.Module = copy.deepcopy(model, memo)
            self._loss = _copy(loss, memo)
        except Exception as error:  # anything can be in a model
            raise PlanError(
                "Expected a model and a loss that copy.deepcopy can copy, got "
                f"{type(error).__name__}: {error}. Check them without what cannot be copied: "
                "locks, files, outputs that a forward has kept."
            ) from error
        for value in list(memo.values()):  # everything copied
            if isinstance(value, Tensor):
                value.data = widen(value.data, dtype)
        _hook_again(memo, [*model.parameters(), *module_of(loss).parameters()])
        self.named = named_parameters(self._model, self._loss)

    def fresh(self) -> tuple[nn.Module, Any]:
        """Return another copy, which shares only the parameters."""
        shared = [*self._model.parameters(), *module_of(self._loss).parameters()]
        memo: dict[int, Any] = {id(parameter): parameter for parameter in shared}
        return copy.deepcopy(self._model, memo), _copy(self._loss, memo)


def named_parameters(model: nn.Module, loss: object) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of the model by name, and those of the loss under `loss.`."""
    named = dict(model.named_parameters())
    own = set(named.values())
    named |= {f"loss.{name}": p for name, p in module_of(loss).named_parameters() if p not in own}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


@contextmanager
def untouched(model: nn.Module, loss: object) -> Generator[None]:
    """Restore model, loss and random streams afterwards: a deep copy may share state with its original."""
    modules = model, module_of(loss)
    objects = ObjectState(modules)  # except values of tensors
    tensors = {t for root in modules for t in (*root.parameters(), *root.buffers())}
    values = [(t, t.detach().clone()) for t in tensors if not nn.parameter.is_lazy(t)]
    try:
        with rng.preserved():
            yield
    finally:
        objects.put_back()
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):  # an unchanged one may be expanded, and not writable
                    tensor.copy_(value)


def _hook_again(memo: Mapping[int, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Register the hooks on gradients again, which deepcopy does not copy."""
    for parameter in parameters:
        twin = memo.get(id(parameter))
        if twin is None:  # not copied, because of a `__deepcopy__` of the model
            continue
        on_gradient, once_accumulated = private.hooks_of_tensor(parameter)
        for hook in on_gradient.values():
            twin.register_hook(hook)
        for hook in once_accumulated.values():
            twin.register_post_accumulate_grad_hook(hook)


def widen(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a real floating tensor to a dtype; return any other unchanged."""
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)


def _copy(loss: Any, memo: dict[int, Any]) -> Any:
    if id(loss) in memo:
        return memo[id(loss)]
    if isinstance(loss, FunctionType):
        return _copy_function(loss, memo)
    if isinstance(loss, partial):
        held = cast("partial[Any]", loss)
        named = {name: _copy_held(value, memo) for name, value in held.keywords.items()}
        return partial(_copy(held.func, memo), *[_copy_held(value, memo) for value in held.args], **named)
    if dataclasses.is_dataclass(loss) and not isinstance(loss, type):
        functions = {
            field.name: _copy(getattr(loss, field.name), memo)
            for field in dataclasses.fields(loss)
            if field.init and callable(getattr(loss, field.name))
        }
        return dataclasses.replace(loss, **functions)
    return copy.deepcopy(loss, memo)


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> Callable[..., Any]:
    """Copy a function with its closure, its defaults, and the tensors and modules among its globals."""
    cells = function.__closure__ or ()
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    changed = {name: value for name, value in used.items() if isinstance(value, Tensor | nn.Module)}
    defaults, named = function.__defaults__, function.__kwdefaults__ or {}
    if not (cells or changed or any(isinstance(v, _COPIED) for v in (*(defaults or ()), *named.values()))):
        return function  # torch's own functions are recognised by identity
    scope = function.__globals__
    if changed:
        scope = scope | {name: _copy_held(value, memo) for name, value in changed.items()}
    fresh = tuple([CellType() for _ in cells])
    twin = FunctionType(function.__code__, scope, function.__name__, defaults, fresh)
    memo[id(function)] = memo[id(twin)] = twin  # before its cells: a function may close over itself
    for cell, old in zip(fresh, cells, strict=True):
        try:
            cell.cell_contents = _copy_held(old.cell_contents, memo)
        except ValueError:  # a cell that is still empty
            continue
    if defaults:
        twin.__defaults__ = tuple([_copy_held(value, memo) for value in defaults])
    twin.__kwdefaults__ = {name: _copy_held(value, memo) for name, value in named.items()}
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    twin.__dict__ = vars(function)
    return twin


def _copy_held(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a tensor, module, function or container; data sets, files and the like stay shared."""
    return _copy(value, memo) if isinstance(value, _COPIED) else memo.get(id(value), value)
