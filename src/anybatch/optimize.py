"""From the finished gradient to new weights: clip once, hand over, update, one scheduler step."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.errors import NonFiniteLossError
from anybatch.gradients import hand_over


def clip(gradients: Mapping[nn.Parameter, Tensor], max_norm: float) -> float:
    """Scale the gradient in place so that its 2-norm is at most `max_norm`: once, on the whole batch's gradient.

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
    norm = get_total_norm(values)
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
    gradients: Mapping[nn.Parameter, Tensor], optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]
) -> None:
    """One step of each optimizer, then one of each scheduler."""
    hand_over(gradients)
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
