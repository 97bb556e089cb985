"""Learning rates for another batch size, linear or by the square root, and warm-up."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from anybatch.core import PlanError, check_whole

RULES = ("linear", "square-root")


def scale(lr: float, *, batch_size: int, base_batch_size: int, rule: str = "linear") -> float:
    """Return the learning rate for another batch size.

    `linear` keeps the expected update per row (Goyal et al. 2017, "Training ImageNet in 1 hour",
    section 2.1; it needs a warm-up). `square-root` keeps the variance of the update (Krizhevsky 2014, "One
    weird trick for parallelizing convolutional neural networks", section 5); it is the milder rule.

    Args:
        lr: the learning rate found for `base_batch_size`.
        batch_size: rows of the new logical batch.
        base_batch_size: rows of the old logical batch.
        rule: "linear" or "square-root".

    Example:
        >>> scale(0.1, batch_size=1024, base_batch_size=256)
        0.4
        >>> scale(0.1, batch_size=1024, base_batch_size=256, rule="square-root")
        0.2
    """
    for name, value in (("lr", lr), ("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if not 0 < value < math.inf:
            raise PlanError(
                f"Expected {name} to be a positive number, got {value}. Pass a finite number above 0."
            )
    if rule not in RULES:
        raise PlanError(f"Expected a rule to scale the learning rate by, got {rule!r}. Choose from {RULES}.")
    ratio = batch_size / base_batch_size
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))


def warm_up(optimizer: Optimizer, *, updates: int) -> LinearLR:
    """Return a scheduler that raises the learning rate linearly over the first updates.

    The first update is made at `lr / updates`, update number `updates` and all later ones at `lr` (Goyal et
    al. 2017, section 2.2). Combine it with another by `ChainedScheduler([warm_up(...), other])`.

    Args:
        optimizer: the optimizer whose learning rates are raised.
        updates: number of updates of the warm-up, at least 1.

    Returns:
        Torch's `LinearLR`, for `Options(scheduler=...)` of a step.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
        >>> scheduler, seen = warm_up(optimizer, updates=4), []
        >>> for _ in range(6):
        ...     seen.append(round(optimizer.param_groups[0]["lr"], 6))
        ...     optimizer.step()
        ...     scheduler.step()
        >>> seen
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    """
    check_whole("updates", updates, least=1)
    # LinearLR goes from start_factor to 1 in total_iters steps after the first update.
    return LinearLR(optimizer, start_factor=1 / updates, total_iters=updates - 1)
