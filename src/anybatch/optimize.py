"""From the finished gradient to new weights: clip once, hand over, update, one scheduler step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch.errors import NonFiniteLossError, OptimizerError
from anybatch.gradients import hand_over


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


def update(gradients: Mapping[nn.Parameter, Tensor], optimizers: Iterable[Optimizer]) -> None:
    """Hand the gradients over, then one step of each optimizer."""
    hand_over(gradients)
    for optimizer in optimizers:
        optimizer.step()


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
