"""Testing: a slow and obvious reference step, and the table of tolerances."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.check import Recorder, named_parameters, relative_error, tolerance
from anybatch.core import Collate, Total, tree
from anybatch.losses import Terms, call_model, resolve, split_batch, summed_loss
from anybatch.state import rng

__all__ = [
    "GradientRecorder",
    "Reference",
    "reference_step",
    "relative_error",
    "tolerance",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """The loss and gradients of the whole batch in float64."""

    loss: float  # NaN if no row has weight
    gradients: Mapping[str, Tensor]  # by name in the model; names of loss parameters begin with `loss.`


def reference_step(
    model: nn.Module, loss: object, batch: Any, *, collate: Collate | None = None
) -> Reference:
    """Run one forward and one backward on the whole batch, in float64, with a deep copy of model and loss.

    Losses of torch are called with their own reduction. Totals of your own function are divided term by term,
    once. Model, loss, batch and random state stay unchanged.

    The arguments are those of `anybatch.Step`; `model` may have any floating dtype.

    Example:
        >>> import anybatch as ab
        >>> model = nn.Linear(2, 1)
        >>> batch = torch.ones(4, 2), torch.zeros(4, 1)
        >>> recorder = GradientRecorder(model)
        >>> report = ab.Step(model, nn.MSELoss(), recorder, micro_batch=3)(batch)
        >>> expected = reference_step(model, nn.MSELoss(), batch)
        >>> relative_error(recorder.gradients, expected.gradients) <= tolerance(torch.float32, 2)
        True
    """
    model, loss = copy.deepcopy(model).double(), _in_float64(loss)
    named = named_parameters(model, loss)
    for parameter in named.values():
        parameter.grad = None
    whole = tree.map_leaves(_widen, batch if collate is None else collate(list(batch)))
    with rng.preserved():
        value = _whole_loss(model, loss, whole)
        if value.requires_grad:
            value.backward()
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    return Reference(loss=value.item(), gradients=gradients)


class GradientRecorder(Recorder):
    """An optimizer that changes nothing and keeps a copy of the gradients.

    Args:
        model: its trainable parameters are recorded by name.
        loss: its parameters, if it is or holds a module, are recorded under `loss.`.

    Example:
        >>> import anybatch as ab
        >>> model = nn.Linear(1, 1, bias=False)
        >>> recorder = GradientRecorder(model)
        >>> batch = torch.ones(2, 1), model.weight.detach() - torch.ones(2, 1)
        >>> _ = ab.Step(model, nn.MSELoss(reduction="sum"), recorder)(batch)
        >>> recorder.gradients
        {'weight': tensor([[4.]])}
    """

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        super().__init__(named_parameters(model, loss))


def _widen(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value


def _in_float64(loss: object) -> Any:
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    if isinstance(loss, partial):
        settings: dict[str, Any] = dict(loss.keywords)
        settings |= {name: _widen(one) for name, one in settings.items() if isinstance(one, Tensor)}
        return partial(cast("Any", loss.func), *loss.args, **settings)
    for name in ("function", "call"):  # ab.Terms and others; ab.ModelLoss
        if hasattr(loss, name):
            return replace(cast("Any", loss), **{name: _in_float64(getattr(loss, name))})
    return loss


def _whole_loss(model: nn.Module, loss: Any, whole: Any) -> Tensor:
    known = summed_loss(loss)
    if known is not None:  # used only to arrange its arguments
        inputs, targets = split_batch(whole, has_target=known.kind.has_target)
        return loss(*known.kind.arrange(call_model(model, inputs), targets))
    if not callable(loss) and not isinstance(loss, Terms):  # ab.WholeBatch and ab.ModelLoss
        return torch.stack([*resolve(loss).uncut().evaluate(model, whole).sums.values()]).sum()
    function, coefficients = (loss.function, loss.coefficients) if isinstance(loss, Terms) else (loss, {})
    totals = function(model, whole)
    named = {"loss": totals} if isinstance(totals, Total) else cast("Mapping[str, Total]", totals)
    if not any(total.weight > 0 for total in named.values()):
        return torch.tensor(math.nan)
    scaled: list[Tensor] = []
    for name, total in named.items():
        mean = torch.as_tensor(total.mean() if total.weight > 0 else 0 * total.sum, dtype=torch.float64)
        scaled.append(coefficients.get(name, 1.0) * mean)
    return torch.stack(scaled).sum()
