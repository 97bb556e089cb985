"""From the finished gradient to new weights: clip once, hand over, update, one scheduler step."""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from anybatch.core import (
    NonFiniteLossError,
    OptimizerError,
    OutOfMemoryError,
    free_caches,
    ran_out_of_memory,
    released,
)
from anybatch.engine.gradients import hand_over


def clip(gradients: Mapping[nn.Parameter, Tensor], max_norm: float) -> float:
    """Scale the whole batch's gradient in place, once, so that its 2-norm is at most `max_norm`.

    The arithmetic is that of `torch.nn.utils.clip_grad_norm_`, in the accumulator's dtype.

    Args:
        gradients: the finished gradients.
        max_norm: the largest norm; infinity leaves the gradient as it is.

    Returns:
        The norm before clipping; NaN where none was asked for.

    Raises:
        NonFiniteLossError: the norm is NaN or infinite, so there is nothing sound to scale.

    Example:
        >>> p = nn.Parameter(torch.zeros(2))
        >>> gradient = torch.tensor([3.0, 4.0])
        >>> clip({p: gradient}, 1.0), gradient
        (5.0, tensor([0.6000, 0.8000]))
    """
    if math.isinf(max_norm):
        return math.nan
    values = list(gradients.values())
    # A sparse gradient's norm is that of its values, each place once.
    norm = get_total_norm([v.coalesce().values() if v.is_sparse else v for v in values])
    if not math.isfinite(norm.item()):
        raise NonFiniteLossError(
            f"Expected a finite gradient, got a norm of {norm.item()}. No update was made. "
            "Look for a division by zero or an overflow in the model or the loss."
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))
    return norm.item()


def update(
    gradients: Mapping[nn.Parameter, Tensor], optimizers: Iterable[Optimizer], foreach: bool | None = None
) -> None:
    """Hand the gradients over, then one step of each optimizer.

    Memory runs out here when the first step makes the optimizer's state. Where the optimizer is torch's own,
    groups that have not begun then are tried once more, with caches freed and parameter by parameter; those
    that are done stay done. Of others, or with hooks, nobody knows what has been done: nothing is done over.

    Args:
        gradients: the finished gradients.
        optimizers: stepped in their order.
        foreach: whether each updates all parameters in common operations; None for what it is set to.

    Raises:
        OutOfMemoryError: the second try failed too, the first one in the midst of a group, or there is none.
    """
    if _tried(lambda: hand_over(gradients)):
        free_caches()
        hand_over(gradients)
    for index, optimizer in enumerate(optimizers):
        noted = _Noted(optimizer) if _is_known(optimizer) else _Unknown()
        with _set(optimizer, foreach):
            said = _tried(optimizer.step)
        if not said:
            continue
        rest = noted.not_begun()
        if rest:
            free_caches()
            with _set(optimizer, foreach=False, groups=rest):
                said = _tried(optimizer.step)
        if said:
            is_whole = not index and len(noted.not_begun()) == len(optimizer.param_groups)
            raise OutOfMemoryError(
                f"Expected the update by {type(optimizer).__name__} to fit into memory, got none left "
                f"({said}). "
                + ("No update was made. " if is_whole else noted.torn)
                + "Take an optimizer with a smaller state, train fewer parameters, or free memory."
            )
    # Inside of an autocast of the caller's own torch would go on with weights that were cast before.
    torch.clear_autocast_cache()


def _is_known(optimizer: Optimizer) -> bool:
    """Whether it is torch's own and nothing else is called in its step, so that what it writes to shows.

    Others may write through `.data`, which no version tells, or count in their groups. Fused kernels do not
    tell the version either.
    """
    kind = type(optimizer)
    # What a scheduler puts there wraps the class's own.
    step = vars(optimizer).get("step", kind.step)
    hooks = (
        *optimizer._optimizer_step_pre_hooks,  # pyright: ignore[reportPrivateUsage]
        *optimizer._optimizer_step_post_hooks,  # pyright: ignore[reportPrivateUsage]
        *_global_optimizer_pre_hooks,
        *_global_optimizer_post_hooks,
    )
    is_torchs = kind.__module__.startswith("torch.optim.") and unwrap(step) is unwrap(kind.step)
    return is_torchs and not hooks and not any(group.get("fused") for group in optimizer.param_groups)


class _Unknown:
    """An optimizer of which nobody knows how far it got."""

    torn = (
        "It is unknown what has been updated, as it is not one of torch's own, is fused or has hooks, and it "
        "cannot be undone: go on from a checkpoint. "
    )

    def not_begun(self) -> list[Any]:
        """None that is known to be."""
        return []


class _Noted:
    """One of torch's own before its step, so that it shows afterwards which groups can be done over."""

    torn = "Some parameters may be updated and others not, which cannot be undone: go on from a checkpoint. "

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Of the gradients too: SGD with momentum of Nesterov's kind adds to them.
        self._versions = {p: _versions(p) for p in owned([optimizer]) if p.grad is not None}
        self._states = {
            p: (state.copy(), [_version(value) for value in state.values()])
            for p, state in optimizer.state.items()
            if isinstance(state, dict)
        }

    def not_begun(self) -> list[Any]:
        """The groups from the first that can be done over, whose state is then as before; empty if torn.

        Groups come in their order, so all before the last that shows a sign of having begun are done. That
        one can be done over only if nothing but new state was made for it. Where its parameters were written
        to, nobody knows how far it got: weight decay comes before the step proper.
        """
        groups = self._optimizer.param_groups
        signs = [any(map(self._has_begun, self._updated(group))) for group in groups]
        last = max((index for index, sign in enumerate(signs) if sign), default=0)
        if any(map(self._has_moved, self._updated(groups[last]))):
            return []
        for parameter in self._updated(groups[last]):
            self._drop_what_is_new(parameter)
        return groups[last:]

    def _updated(self, group: Any) -> list[nn.Parameter]:
        return [p for p in group["params"] if p in self._versions]

    def _has_begun(self, parameter: nn.Parameter) -> bool:
        known, _ = self._states.get(parameter, ({}, []))
        return self._has_moved(parameter) or self._optimizer.state.get(parameter, {}).keys() != known.keys()

    def _has_moved(self, parameter: nn.Parameter) -> bool:
        """Whether something was written to it, to its gradient, or to the state that there was before."""
        if _versions(parameter) != self._versions[parameter]:
            return True
        values, versions = self._states.get(parameter, ({}, []))
        state = self._optimizer.state.get(parameter, {})
        return any(
            state.get(name) is not value or _version(value) != version
            for (name, value), version in zip(values.items(), versions, strict=True)
        )

    def _drop_what_is_new(self, parameter: nn.Parameter) -> None:
        if parameter not in self._states:
            self._optimizer.state.pop(parameter, None)
            return
        state: dict[str, Any] = self._optimizer.state[parameter]
        values, _ = self._states[parameter]
        for name in state.keys() - values.keys():
            del state[name]


def _tried(action: Callable[[], object]) -> str:
    """What the allocator said, if memory ran out."""
    try:
        action()
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return released(error)
    return ""


@contextmanager
def _set(optimizer: Optimizer, foreach: bool | None, groups: list[Any] | None = None) -> Generator[None]:
    """Other settings for a while: common operations or not, and only some of the groups."""
    if foreach is None and groups is None:
        yield
        return
    found = optimizer.param_groups
    able = [] if foreach is None else [one for one in found if "foreach" in one and not one.get("fused")]
    was = [group["foreach"] for group in able]
    for group in able:
        group["foreach"] = foreach
    optimizer.param_groups = found if groups is None else groups
    try:
        yield
    finally:
        optimizer.param_groups = found
        for group, value in zip(able, was, strict=True):
            group["foreach"] = value


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) else 0  # pyright: ignore[reportPrivateUsage]


def _versions(parameter: nn.Parameter) -> tuple[int, int]:
    return _version(parameter), _version(parameter.grad)


def schedule(schedulers: Iterable[LRScheduler]) -> None:
    """One step of each scheduler, after the update."""
    for scheduler in schedulers:
        scheduler.step()


def owned(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """The parameters of these optimizers, in their order, the frozen ones too."""
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


def check_optimizers(optimizer: object, known: Iterable[nn.Parameter]) -> tuple[Optimizer, ...]:
    """One optimizer or a sequence of them, as a tuple.

    Args:
        optimizer: what the caller handed over.
        known: the parameters of the model and the loss.

    Raises:
        OptimizerError: none at all, no torch optimizer, LBFGS, one without any known parameter, or two that
            share one.
    """
    optimizers = _as_tuple(optimizer)
    ours = set(known)
    owners: dict[nn.Parameter, int] = {}
    for index, one in enumerate(optimizers):
        if isinstance(one, LBFGS):
            raise OptimizerError(
                f"Expected an optimizer that makes one update from one gradient, got {type(one).__name__}. "
                "It asks for the loss again and again within one update; use another one."
            )
        if not isinstance(one, Optimizer):
            raise OptimizerError(f"Expected a torch optimizer, got {type(one).__name__}. {_EXAMPLE}")
        parameters = owned([one])
        if ours.isdisjoint(parameters):
            raise OptimizerError(
                f"Expected optimizer {index} to hold parameters of the model, got {len(parameters)} that are "
                "none of its. Make it from model.parameters(), after the model was moved or wrapped."
            )
        shared = [p for p in parameters if owners.setdefault(p, index) != index]
        if shared:
            raise OptimizerError(
                f"Expected every parameter in one optimizer, got {len(shared)} in optimizers "
                f"{owners[shared[0]]} and {index}. Each update would be made twice; give it to one of them."
            )
    if not optimizers:
        raise OptimizerError(f"Expected an optimizer, got {optimizer!r}. {_EXAMPLE}")
    return cast("tuple[Optimizer, ...]", optimizers)


def check_schedulers(scheduler: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    """One scheduler or a sequence of them, as a tuple.

    Raises:
        OptimizerError: no scheduler, one that waits for a metric, or one of another optimizer.
    """
    schedulers = _as_tuple(scheduler)
    for one in schedulers:
        if not isinstance(one, LRScheduler) or isinstance(one, ReduceLROnPlateau):
            raise OptimizerError(
                f"Expected a scheduler that steps once per update, got {type(one).__name__}. "
                "ReduceLROnPlateau waits for a metric: step it yourself after validation."
            )
        if not any(one.optimizer is optimizer for optimizer in optimizers):
            raise OptimizerError(
                f"Expected {type(one).__name__} to schedule an optimizer of this step, got one for another. "
                "Make it from the same optimizer."
            )
    return cast("tuple[LRScheduler, ...]", schedulers)


_EXAMPLE = "Pass torch.optim.SGD(model.parameters(), lr=...) or another."


def _as_tuple(given: Any) -> tuple[object, ...]:
    return tuple(given) if isinstance(given, list | tuple) else (given,)
