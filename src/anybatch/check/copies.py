"""Copies to probe, in float64 where the model runs in it; where nothing can be copied, all is put back."""

import copy
import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from anybatch.core import torch_private as private
from anybatch.losses import module_of
from anybatch.state import rng

_CONTAINERS = (list, dict, set)
_COPIED = (Tensor, nn.Module, FunctionType, partial, *_CONTAINERS)


class Subject(Protocol):
    """A model and its loss, fresh for each pass."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating numbers of a batch are turned into; None where they stay as they are."""
        ...

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters that every pass shares, by name."""
        ...

    @contextmanager
    def fresh(self) -> Generator[tuple[nn.Module, Any]]:
        """Model and loss as they were before any pass."""
        ...


class Copied:
    """A deep copy of model and loss; each pass takes a copy of it that shares the parameters.

    So what one pass leaves behind (buffers, attributes) is not seen by the next.

    Args:
        model: left alone.
        loss: left alone; what a function closes over is copied too.
        dtype: what floating parameters, buffers and plain tensors are turned into; None for their own.
    """

    def __init__(self, model: nn.Module, loss: object, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        memo: dict[int, Any] = {}
        self._model: nn.Module = copy.deepcopy(model, memo)
        self._loss = _copy_loss(loss, memo, dtype)
        for module in (self._model, module_of(self._loss)):
            _cast(module, dtype)
        _hook_again(memo, [*model.parameters(), *module_of(loss).parameters()])
        self.named = named_parameters(self._model, self._loss)

    @contextmanager
    def fresh(self) -> Generator[tuple[nn.Module, Any]]:
        """A copy that shares the parameters, and nothing else."""
        shared = [*self._model.parameters(), *module_of(self._loss).parameters()]
        memo: dict[int, Any] = {id(parameter): parameter for parameter in shared}
        yield copy.deepcopy(self._model, memo), _copy_loss(self._loss, memo, None)


class Itself:
    """The caller's own model and loss, put back after each pass: for what cannot be copied."""

    dtype = None

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._model, self._loss = model, loss
        self.named = named_parameters(model, loss)

    @contextmanager
    def fresh(self) -> Generator[tuple[nn.Module, Any]]:
        """The model itself; afterwards it is as it was."""
        with kept(self._model, module_of(self._loss)):
            yield self._model, self._own_loss()

    def _own_loss(self) -> Any:
        """A copy of a function that holds this very model; what cannot be copied, or is trained, as it is."""
        shared = [*self._model.modules(), *module_of(self._loss).modules()]
        memo: dict[int, Any] = {id(value): value for value in shared}
        try:
            return _copy_loss(self._loss, memo, None)
        except Exception:  # anything can be in a loss, and much of it cannot be copied
            return self._loss


def named_parameters(model: nn.Module, loss: object) -> dict[str, nn.Parameter]:
    """Trainable parameters of the model by name, and of the loss under `loss.`."""
    named = dict(model.named_parameters())
    own = set(named.values())
    named |= {f"loss.{name}": p for name, p in module_of(loss).named_parameters() if p not in own}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


@contextmanager
def untouched(model: nn.Module, loss: object) -> Generator[None]:
    """Afterwards model, loss and every random stream are as before.

    Example:
        >>> before = torch.get_rng_state()
        >>> with untouched(nn.Identity(), nn.MSELoss()):
        ...     _ = torch.rand(1)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    state = rng.capture_process()
    try:
        with kept(model, module_of(loss)):
            yield
    finally:
        rng.restore_process(state)


@contextmanager
def kept(*modules: nn.Module) -> Generator[None]:
    """Afterwards these modules are as before: values, gradients, buffers, flags, hooks, attributes."""
    found = {id(module): module for root in modules for module in root.modules()}.values()
    attributes = [(module, dict(vars(module))) for module in found]
    inside = [
        (value, copy.copy(value))
        for _, held in attributes
        for value in held.values()
        if isinstance(value, _CONTAINERS)
    ]
    tensors = {id(t): t for root in modules for t in (*root.parameters(), *root.buffers()) if _is_real(t)}
    values = [(t, t.detach().clone(), t.grad, t.requires_grad) for t in tensors.values()]
    try:
        yield
    finally:
        for module, held in attributes:
            vars(module).clear()
            vars(module).update(held)
        for value, content in inside:
            _refill(value, content)
        _put_back(values)


def _put_back(values: Iterable[tuple[Tensor, Tensor, Tensor | None, bool]]) -> None:
    with torch.no_grad():
        for tensor, value, gradient, requires_grad in values:
            if not torch.equal(tensor, value):  # what is constant may be expanded, and not writable
                tensor.copy_(value)
            tensor.grad = gradient
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def _hook_again(memo: Mapping[int, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Hooks on gradients, which a deep copy of a parameter loses, on the copies."""
    for parameter in parameters:
        twin = memo.get(id(parameter), parameter)
        if twin is parameter:
            continue
        on_gradient, once_accumulated = private.hooks_of_tensor(parameter)
        for hook in on_gradient.values():
            twin.register_hook(hook)
        for hook in once_accumulated.values():
            twin.register_post_accumulate_grad_hook(hook)


@contextmanager
def perturbed(parameters: Iterable[Tensor]) -> Generator[None]:
    """Meanwhile each number is the next one above or below it.

    Example:
        >>> value = nn.Parameter(torch.ones(3, dtype=torch.float64))
        >>> with perturbed([value]):
        ...     bool((value == 1).any())
        False
    """
    values = [(parameter, parameter.detach().clone()) for parameter in parameters]
    with torch.no_grad():
        for parameter, value in values:
            if value.is_floating_point():
                up = torch.arange(value.numel(), device=value.device).view(value.shape) % 3 > 0
                far = torch.where(up, math.inf, -math.inf).to(value.dtype)
                parameter.copy_(torch.nextafter(value, far))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        cast("list[Any]", container).extend(content)
    else:
        container.update(content)


def _is_real(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor)


def _cast(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Parameters, buffers and tensors that are plain attributes."""
    if dtype is None:
        return
    module.to(dtype)
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                vars(part)[name] = widen(value, dtype)


def widen(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A real floating tensor in another dtype; any other as it is."""
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)


def _copy_loss(loss: Any, memo: dict[int, Any], dtype: torch.dtype | None) -> Any:
    """A copy of what computes the loss: functions with what they close over, modules, callable objects."""
    if id(loss) in memo:
        return memo[id(loss)]
    if isinstance(loss, FunctionType):
        return _copy_function(loss, memo, dtype)
    if isinstance(loss, partial):
        held = cast("partial[Any]", loss)
        positional = [_copy_held(value, memo, dtype) for value in held.args]
        named = {name: _copy_held(value, memo, dtype) for name, value in held.keywords.items()}
        return partial(_copy_loss(held.func, memo, dtype), *positional, **named)
    if dataclasses.is_dataclass(loss) and not isinstance(loss, type):
        functions = {
            field.name: _copy_loss(getattr(loss, field.name), memo, dtype)
            for field in dataclasses.fields(loss)
            if field.init and callable(getattr(loss, field.name))
        }
        return dataclasses.replace(loss, **functions)
    if isinstance(loss, Tensor):
        return copy.deepcopy(widen(loss, dtype), memo)
    duplicate = copy.deepcopy(loss, memo)
    if isinstance(duplicate, nn.Module):
        _cast(duplicate, dtype)
    elif hasattr(duplicate, "__dict__") and callable(duplicate):
        for name, value in vars(duplicate).items():
            if isinstance(value, Tensor):
                vars(duplicate)[name] = widen(value, dtype)
    return duplicate


def _copy_function(
    function: FunctionType, memo: dict[int, Any], dtype: torch.dtype | None
) -> Callable[..., Any]:
    """The same code over copies of the cells, the defaults, and the globals that are tensors or modules."""
    cells = function.__closure__ or ()
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    changed = {name: value for name, value in used.items() if isinstance(value, Tensor | nn.Module)}
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not (cells or changed or any(isinstance(value, _COPIED) for value in defaults)):
        return function
    scope = function.__globals__
    if changed:
        scope = scope | {name: _copy_held(value, memo, dtype) for name, value in changed.items()}
    fresh = tuple([CellType() for _ in cells])
    twin = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, fresh)
    memo[id(function)] = twin  # before its cells: a function may close over itself
    memo[id(twin)] = twin
    for cell, old in zip(fresh, cells, strict=True):
        try:
            cell.cell_contents = _copy_held(old.cell_contents, memo, dtype)
        except ValueError:  # a cell that is still empty
            continue
    if function.__defaults__:
        twin.__defaults__ = tuple([_copy_held(value, memo, dtype) for value in function.__defaults__])
    named = function.__kwdefaults__ or {}
    twin.__kwdefaults__ = {name: _copy_held(value, memo, dtype) for name, value in named.items()}
    twin.__qualname__, twin.__module__, twin.__dict__ = (
        function.__qualname__,
        function.__module__,
        vars(function),
    )
    return twin


def _copy_held(value: Any, memo: dict[int, Any], dtype: torch.dtype | None) -> Any:
    """What a function holds, as far as it may matter to a pass; data sets, files and the like stay shared."""
    if isinstance(value, _COPIED):
        return _copy_loss(value, memo, dtype)
    return memo.get(id(value), value)
