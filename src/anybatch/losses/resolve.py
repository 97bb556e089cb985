"""From what the caller hands over as a loss to what a step needs; doubts end here."""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]

from anybatch.errors import LossError
from anybatch.losses.loss import Loss
from anybatch.losses.summed import SummedLoss, summed_loss
from anybatch.losses.terms import BARE_MEAN, Terms


def resolve(loss: object) -> Loss:
    """Read a loss: one of torch's modules or functions, `Terms`, or a function `(model, micro) -> Total`.

    Cheap: a step reads it anew each time, so that settings changed in between (a label smoothing, a moved class
    weight) take effect.

    Raises:
        LossError: it is none of these.

    Example:
        >>> resolve(nn.CrossEntropyLoss(ignore_index=0)).counted
        True
    """
    if isinstance(loss, Terms):
        return loss
    known = summed_loss(loss)
    if known is not None:
        return known
    if isinstance(loss, nn.Module):
        meant = "is a loss of torch that anybatch cannot sum" if isinstance(loss, _Loss) else "is a module of your own"
        raise LossError(
            f"Expected a loss whose sum and weight are known, got {type(loss).__name__}, which {meant}. {BARE_MEAN}\n"
            "A module that takes (model, micro) and returns an ab.Total goes in as ab.Terms(module)."
        )
    if any(loss is function for function in vars(F).values()):
        raise LossError(f"Expected a loss whose sum and weight are known, got {getattr(loss, '__name__', loss)}. {BARE_MEAN}")
    return Terms(cast("Any", loss))


def check(loss: object) -> None:
    """Refuse at the door what could never be summed exactly: class weights that require grad or are negative.

    Raises:
        LossError: see `resolve`; or a weight that requires grad or is negative.
    """
    resolved = resolve(loss)
    if not isinstance(resolved, SummedLoss):
        return
    for name in ("weight", "pos_weight"):
        weight: Tensor | None = resolved.settings.get(name)
        if weight is None:
            continue
        if weight.requires_grad:
            raise LossError(f"Expected `{name}` of the loss without gradient, got one that requires grad. Use .detach().")
        if weight.is_floating_point() and bool((weight < 0).any()):
            raise LossError(f"Expected `{name}` of the loss to be at least 0, got a minimum of {weight.min().item()}.")
