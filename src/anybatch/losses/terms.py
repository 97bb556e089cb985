"""A loss written by the user: a function of the model and a micro-batch that returns totals."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.core import Batch, LossError, Number, Total
from anybatch.losses.inputs import HOW_TO_WRITE
from anybatch.losses.loss import Evaluated, Plain

BARE_MEAN = (
    "Wrap it: ab.PerRow(fn) for fn(outputs, targets) with a value for each row, ab.ModelLoss(call=fn) for "
    "fn(model, micro) that returns a mean, ab.Additive(fn) for one divided by a total known beforehand. Or "
    f"return a sum and what divides it, not a mean:\n{HOW_TO_WRITE}"
)
HOW = f"Pass a loss of torch, such as nn.CrossEntropyLoss(), or write\n{HOW_TO_WRITE}"
_CALLED = (
    "anybatch calls a loss of your own as loss(model, micro), not as loss(outputs, targets). If it returns a "
    f"value for each row or entry, pass ab.PerRow(loss). Else p{HOW[1:]}"
)
_OUTPUTS = {"out", "output", "outputs", "logits", "pred", "preds", "predictions", "y_pred", "y_hat"}
_TARGETS = {"y", "target", "targets", "label", "labels", "truth", "gt", "y_true"}


@dataclass(frozen=True, slots=True)
class Terms(Plain):
    """Named totals with coefficients: auxiliary losses, each divided by its own weight.

    A step accepts a function `(model, micro) -> Total` directly. Use `Terms` to give coefficients, or the
    weight of the whole batch before its first forward.

    Args:
        function: takes the model and a micro-batch, returns a `Total` or a mapping of named totals, with the
            same names for every micro-batch. Terms without gradient are only reported.
        coefficients: factor of each named term in the loss, by default 1.
        weight: takes the whole batch as given to the step, returns the weight of the batch, or a mapping of
            weights by name. Without it the gradient is divided at the end, which costs one gradient buffer
            and one backward per further term.

    Raises:
        LossError: a coefficient is not a finite number.

    Example:
        >>> def function(model, micro):
        ...     x, y = micro
        ...     error = (model(x) - y).square()
        ...     size = model.weight.square().sum()
        ...     return {"fit": Total(error.sum(), error.numel()), "size": Total(size * len(x), len(x))}
        >>> loss = Terms(function, coefficients={"size": 0.01})
    """

    function: Callable[[nn.Module, Any], Total | Mapping[str, Total]]
    coefficients: Mapping[str, float] = field(default_factory=dict[str, float])
    weight: Callable[[Any], Number | Mapping[str, Number]] | None = None

    divided = False
    counted = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise LossError(
                f"Expected a function (model, micro) -> ab.Total, got {type(self.function).__name__}. {HOW}"
            )
        for name, value in self.coefficients.items():
            if not math.isfinite(value):
                raise LossError(
                    f"Expected a finite coefficient for {name!r}, got {value}. Use 0 to report a term only."
                )

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Call the function and check that it returned totals."""
        returned = call_loss(self.function, model, micro)
        totals = _named(returned)
        missing = [name for name in self.coefficients if name not in totals]
        if missing:
            raise LossError(
                f"Expected a term for every coefficient, got {sorted(totals)} without {missing}. "
                "Return that name from the loss, or drop its coefficient."
            )
        sums = {name: _as_tensor(total.sum) for name, total in totals.items()}
        return Evaluated(sums, lambda: {name: total.weight for name, total in totals.items()})

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """Return the user's weights of the batch; for an uncut batch those of its only micro-batch."""
        if first_rows == batch.rows:
            return first.weigh()
        if self.weight is None or not batch.rows:
            return None
        given = self.weight(batch.given)
        weights = given if isinstance(given, Mapping) else dict.fromkeys(first.sums, given)
        if set(weights) != set(first.sums):
            raise LossError(
                f"Expected a weight for each of {sorted(first.sums)}, got {sorted(weights)}. "
                "Name the same terms in both."
            )
        # A Total checks its weight.
        return {name: Total(0, weight).weight for name, weight in weights.items()}


def call_loss(function: Callable[[nn.Module, Any], Any], model: nn.Module, micro: Any) -> Any:
    """Return the result of a user's loss; add a note to errors of one written for (outputs, targets)."""
    try:
        return function(model, micro)
    except (TypeError, AttributeError) as error:
        if _CALLED not in getattr(error, "__notes__", ()) and _takes_outputs(function, model, error):
            error.add_note(_CALLED)
        raise


def _takes_outputs(function: object, model: nn.Module, error: Exception) -> bool:
    frames = error.__traceback__
    if frames is None or frames.tb_next is None or type(model).__name__ in str(error):
        return True  # it does not accept two arguments, or used the model as a tensor
    try:
        names = [name.lower() for name in inspect.signature(cast("Any", function)).parameters]
    except (TypeError, ValueError):  # not a Python function
        return False
    return not _OUTPUTS.isdisjoint(names[:1]) or not _TARGETS.isdisjoint(names[1:2])


def _named(value: object) -> Mapping[str, Total]:
    if isinstance(value, Total):
        return {"loss": value}
    if isinstance(value, Mapping):
        totals = cast("Mapping[str, object]", value)
        wrong = {name: type(total).__name__ for name, total in totals.items() if not isinstance(total, Total)}
        if totals and not wrong:
            return cast("Mapping[str, Total]", totals)
        raise LossError(
            f"Expected a mapping of named ab.Total values, got {wrong or 'an empty one'}. {BARE_MEAN}"
        )
    came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise LossError(
        f"Expected the loss function to return an ab.Total or a mapping of them, got {came}. {BARE_MEAN}"
    )


def _as_tensor(value: Number) -> Tensor:
    # float64 keeps a number exact: the first sum sets the dtype of the backward.
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
