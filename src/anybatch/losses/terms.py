"""Losses written by the user: functions that return totals, values of rows, or sums that add up."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, LossError, Number, Total, tree
from anybatch.losses.cotangents import part
from anybatch.losses.inputs import call, how_to_write, note, noted, several, shown, split_batch
from anybatch.losses.loss import Evaluated, Loss
from anybatch.losses.reductions import summed

HOW = f"Pass a loss of torch, such as nn.CrossEntropyLoss(), or write\n{how_to_write()}"
_CALLED = (
    "anybatch calls a loss of your own as loss(model, micro), not as loss(outputs, targets). If it returns a "
    "value for each row or entry, pass ab.PerRow(loss); if a mean, pass ab.ModelLoss(call=lambda model, "
    f"micro: loss(model(micro[0]), micro[1])). Else p{HOW[1:]}"
)
_MODELS = {"model", "net", "network", "module", "m"}
_OUTPUTS = {"out", "output", "outputs", "logits", "pred", "preds", "predictions", "y_pred", "y_hat"}
_TARGETS = {"y", "target", "targets", "label", "labels", "truth", "gt", "y_true"}


@dataclass(frozen=True, slots=True)
class Terms(Loss):
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
        check_function(self.function, "(model, micro) -> ab.Total")
        for name, value in self.coefficients.items():
            if not math.isfinite(value):
                raise LossError(
                    f"Expected a finite coefficient for {name!r}, got {value}. Use 0 to report a term only."
                )

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Call the function and check that it returned totals."""
        returned = call_loss(self.function, model, micro)
        totals = _named(returned, micro)
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


@dataclass(frozen=True, slots=True)
class PerRow:
    """The mean over all rows of a loss that returns a value for each row, or for each entry of a row.

    The function is called as losses of torch are: with the model's output (with each of them, if the model
    returns a tuple), then with the target, or with each of several. The target is the last part of a tuple,
    or has one of the keys `target`, `targets`, `label`, `labels`, `y`. Other mappings, `(inputs,)` and a
    tensor have none.

    Args:
        function: takes outputs and targets of some rows, returns a floating tensor of shape (rows,) or
            (rows, ...). The loss is the mean of all values of the batch. Or it returns a tuple
            `(values, weights)` of one shape, where weights (bool, integer or floating, at least 0, without
            gradient) may be a mask. The loss is then sum(values * weights) / sum(weights) over the batch. It
            may be a module with parameters, such as `nn.CrossEntropyLoss(reduction="none")`, in whose mean
            ignored targets count as 0.

    Raises:
        LossError: the function cannot be called, or returns something else, such as a mean.

    Example:
        >>> def masked_error(output, target):
        ...     return (output - target.nan_to_num()).square(), ~target.isnan()
        >>> batch = torch.zeros(3, 1), torch.tensor([[2.0], [math.nan], [4.0]])
        >>> PerRow(masked_error)(nn.Linear(1, 1, bias=False), batch).mean().item()
        10.0
    """

    function: Callable[..., Tensor | tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        check_function(self.function, "(outputs, targets) with a value for each row")

    def __call__(self, model: nn.Module, micro: Any) -> Total:
        """Return the sum of the values of a micro-batch, and their number or summed weights."""
        inputs, targets = split_batch(micro) if tree.is_sequence(micro) else part(model, micro)
        arguments = (*several(call(model, inputs)), *targets)
        returned = noted(self.function, *arguments)
        values, *weights = returned if isinstance(returned, tuple) else (returned,)
        rows = {len(one) for one in arguments if isinstance(one, Tensor) and one.dim()}
        if not isinstance(values, Tensor) or not values.dim() or (rows and len(values) not in rows):
            raise LossError(
                "Expected a value for each row from the function in ab.PerRow, shape (rows,) or (rows, ...), "
                f'got {told_of(values)}. Leave out its mean or sum (reduction="none"), keep rows in the '
                "first axis, or see ab.ModelLoss(call=...) for a mean and ab.WholeBatch where rows meet."
            )
        if not weights:
            return Total(summed(values * 1), values.numel())  # its backward is that of `mean`, to the bit
        if len(weights) > 1 or not isinstance(weights[0], Tensor) or weights[0].shape != values.shape:
            raise LossError(
                "Expected (values, weights) of one shape from the function in ab.PerRow, got "
                f"{' and '.join(map(told_of, (values, *weights)))}. mask.expand_as(values) is as large."
            )
        return Total(summed(values * weights[0]), summed(weights[0]))


@dataclass(frozen=True, slots=True)
class Additive(Loss):
    """A loss that is divided already by a total of the whole batch, so that micro-batches add up.

    The divisor is a constant, or the number of tokens of the batch, counted outside. The loss of the batch is
    the sum over micro-batches, also over those of other ranks; evaluation adds up over all rows. Uncut, it
    is the function's value, to the bit. Before the first cut the step compares splits of a few rows, and
    refuses a mean; with `Step(check=False)` it takes the caller's word.

    Args:
        function: takes the model and a micro-batch, returns a real scalar tensor of shape ().

    Raises:
        LossError: the function cannot be called, or returns something else.

    Example:
        >>> import anybatch as ab
        >>> loss = ab.Additive(lambda model, micro: model(micro).square().sum() / 512)  # rows of all batches
        >>> model = nn.Linear(2, 1)
        >>> step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=128)
        >>> step(torch.ones(512, 2)).micro_batches
        4
    """

    function: Callable[[nn.Module, Any], Tensor]

    divided = False

    def __post_init__(self) -> None:
        check_function(self.function, "(model, micro) with a scalar that adds up")

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Call the function and check that it returned a scalar."""
        value = call_loss(self.function, model, micro)
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            raise LossError(
                "Expected a real scalar tensor, of shape (), from the function in ab.Additive, got "
                f"{told_of(value)}. Sum it and divide by the total of the batch; an ab.Total needs no "
                "wrapper."
            )
        # A Total widens float16. A micro-batch has no weight of its own.
        return Evaluated({"loss": _as_tensor(Total(value, 0).sum)}, lambda: {"loss": 0})

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number]:
        """Return 1: nothing is left to divide."""
        return {"loss": 1}


def check_function(function: object, wanted: str) -> None:
    """Raise LossError if a function cannot be called."""
    if not callable(function):
        raise LossError(f"Expected a function {wanted}, got {type(function).__name__}. {HOW}")


def call_loss(function: Callable[[nn.Module, Any], Any], model: nn.Module, micro: Any) -> Any:
    """Return the result of a user's loss; a note to its errors tells how it was called."""
    try:
        return function(model, micro)
    except Exception as error:
        if not isinstance(function, PerRow):  # which tells how it called its function
            called = (
                f"anybatch called loss(model, micro) with micro = {shown(micro)}. Take its parts from there."
            )
            note(error, _CALLED if _takes_outputs(function, model, micro, error) else called)
        raise


def _takes_outputs(function: Any, model: nn.Module, micro: object, error: Exception) -> bool:
    if not isinstance(error, TypeError | AttributeError):
        return False
    frames = error.__traceback__
    name = type(model).__name__
    is_of_forward = f"{name}.forward()" in str(error)  # the model was called, with other arguments
    if frames is None or frames.tb_next is None or (name in str(error) and not is_of_forward):
        return True  # it does not accept two arguments, or used the model as a tensor
    try:
        names = [name.lower() for name in inspect.signature(function).parameters]
    except (TypeError, ValueError):  # not a Python function
        return False
    if isinstance(error, AttributeError) and error.obj is micro and hasattr(Tensor, str(error.name)):
        return _MODELS.isdisjoint(names[:1])  # it used the micro-batch as a tensor
    return not _OUTPUTS.isdisjoint(names[:1]) or not _TARGETS.isdisjoint(names[1:2])


def bare_mean(micro: object = None) -> str:
    """Return how to write a loss that is no mean, for batches of the form of this micro-batch."""
    return (
        "Wrap it: ab.PerRow(fn) for fn(outputs, targets) with a value for each row, ab.ModelLoss(call=fn) "
        "for fn(model, micro) that returns a mean, ab.Additive(fn) for one divided by a total known "
        "beforehand, ab.WholeBatch(fn) for fn(outputs, targets) of all rows (Dice of a batch, contrastive). "
        f"Or return a sum and what divides it, not a mean:\n{how_to_write(micro)}"
    )


def _named(value: object, micro: object) -> Mapping[str, Total]:
    totals = {"loss": value} if isinstance(value, Total) else value
    if isinstance(totals, Mapping):
        wrong = {name: type(total).__name__ for name, total in totals.items() if not isinstance(total, Total)}
        if totals and not wrong:
            return totals
        raise LossError(
            f"Expected a mapping of named ab.Total values, got {wrong or 'an empty one'}. {bare_mean(micro)}"
        )
    raise LossError(
        "Expected the loss function to return an ab.Total or a mapping of them, got "
        f"{told_of(value)}. {bare_mean(micro)}"
    )


def told_of(value: object) -> str:
    """Return in words what a loss returned."""
    is_tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if is_tensor else type(value).__name__


def _as_tensor(value: Number) -> Tensor:
    # float64 keeps a number exact: the first sum sets the dtype of the backward.
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
