"""Conversion of the caller's loss to the interface `Loss`; unsupported losses are refused here."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import ismethod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import LossError, Total, kind_of
from anybatch.losses.loss import Loss
from anybatch.losses.model.model_loss import ModelLoss
from anybatch.losses.reductions import WEIGHTS
from anybatch.losses.terms import HOW, Additive, PerRow, Terms, bare_mean
from anybatch.losses.torch_losses import SummedLoss, summed_loss
from anybatch.losses.whole_batch import WholeBatch

#: What a step accepts as its loss.
LossLike = (
    nn.Module
    | Callable[..., Tensor]
    | Callable[..., Total | Mapping[str, Total]]
    | Additive
    | ModelLoss
    | PerRow
    | Terms
    | WholeBatch
)


def resolve(loss: Any) -> Loss:
    """Return the `Loss` for a module or function of torch, `Terms`, or a function `(model, micro) -> Total`.

    It is cheap: each step calls it, so that changed settings (label smoothing, a moved class weight) take
    effect.

    Raises:
        LossError: the loss is of another kind.
    """
    if isinstance(loss, Terms | WholeBatch | Additive):
        return loss
    if isinstance(loss, ModelLoss):
        return loss.begin()
    known = summed_loss(loss)
    if known is not None:
        return known
    if isinstance(loss, nn.Module):
        is_torch = type(loss).__module__.startswith("torch.")
        meant = "of torch that anybatch cannot sum" if is_torch else "of your own (see ab.Terms)"
        raise LossError(
            f"Expected a loss whose sum and weight are known, got {type(loss).__name__}, a module {meant}. "
            f"{bare_mean()}"
        )
    function = loss.func if isinstance(loss, partial) else loss
    name = getattr(function, "__name__", "")
    if name and vars(F).get(name) is function:
        raise LossError(f"Expected a loss whose sum and weight are known, got F.{name}. {bare_mean()}")
    if isinstance(function, type):
        raise LossError(
            f"Expected a loss, got the class {function.__name__}. Call it to make one, as in "
            "nn.CrossEntropyLoss()."
        )
    if not callable(loss):
        raise LossError(
            f"Expected a loss of torch or a function (model, micro) -> ab.Total, got {kind_of(loss)}. {HOW}"
        )
    return Terms(cast("Any", loss))


def check_loss(loss: object) -> None:
    """Raise LossError if `resolve` refuses the loss, or a weight in it is negative, infinite or NaN."""
    resolved = resolve(loss)
    if not isinstance(resolved, SummedLoss):
        return
    for name in WEIGHTS:
        weight = resolved.settings.get(name)
        if isinstance(weight, Tensor) and not bool(((weight >= 0) & torch.isfinite(weight)).all()):
            raise LossError(
                f"Expected `{name}` of {resolved.name} to be finite and at least 0, got values from "
                f"{weight.min().item()} to {weight.max().item()}. It says how much a class or element counts."
            )


def function_of(loss: object) -> object:
    """Return the caller's function in a loss of this package; any other loss unchanged."""
    while isinstance(loss, Terms | WholeBatch | PerRow | Additive):
        loss = loss.function
    return loss.call if isinstance(loss, ModelLoss) and loss.call is not None else loss


def module_of(loss: object) -> nn.Module:
    """Return the module that a loss or its function is, belongs to or wraps; else an empty module."""
    held = function_of(loss)
    held = held.func if isinstance(held, partial) else held
    held = held.__self__ if ismethod(held) else held
    return held if isinstance(held, nn.Module) else nn.Identity()
