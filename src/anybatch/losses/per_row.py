"""A loss that returns a value for each row or entry; that of the batch is their mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from anybatch.core import LossError, Total
from anybatch.losses.cotangents import part
from anybatch.losses.inputs import call
from anybatch.losses.reductions import summed


@dataclass(frozen=True, slots=True)
class PerRow:
    """The mean over all rows of a loss that returns a value for each row, or for each entry of a row.

    The function is called as losses of torch are: with the model's output (with each of them, if the model
    returns a tuple), then with the target, or with each of several. The batch has a target as for
    `ab.WholeBatch`: `(inputs, target)`, or a mapping with one of the keys `target`, `targets`, `label`,
    `labels`, `y`.

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
        >>> import anybatch as ab
        >>> from torch import optim, tensor
        >>> def masked_error(output, target):
        ...     known = ~target.isnan()
        ...     return (output - target.nan_to_num()).square(), known
        >>> model = nn.Linear(1, 1)
        >>> step = ab.Step(model, PerRow(masked_error), optim.SGD(model.parameters(), lr=0.1), micro_batch=1)
        >>> step((tensor([[1.0], [2.0], [3.0]]), tensor([[2.0], [float("nan")], [6.0]]))).weights
        {'loss': 2.0}
    """

    function: Callable[..., Tensor | tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise LossError(
                f"Expected a function (outputs, targets) with a value for each row, got {self.function!r}. "
                'Pass a function, or a loss such as nn.CrossEntropyLoss(reduction="none").'
            )

    def __call__(self, model: nn.Module, micro: Any) -> Total:
        """Return the sum of the values of a micro-batch, and their number or summed weights."""
        inputs, targets = part(model, micro)
        returned: Any = call(model, inputs)
        outputs = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple | list) else (returned,)
        arguments = (*[output for output in outputs if output is not None], *targets)
        values: Any = self.function(*arguments)
        values, *weights = cast("tuple[Any, ...]", values) if isinstance(values, tuple) else (values,)
        rows = {len(one) for one in arguments if isinstance(one, Tensor) and one.dim()}
        shapes = [
            tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (values, *weights)
        ]
        if not isinstance(values, Tensor) or not values.dim() or (rows and len(values) not in rows):
            raise LossError(
                f"Expected {self._name} to return a value for each row, a tensor of shape (rows,) or "
                f'(rows, ...), got {shapes[0]}. Leave out its mean or sum (reduction="none"), keep rows in '
                "the first axis, or see ab.ModelLoss(call=...) for a mean and ab.WholeBatch where rows meet."
            )
        if not weights:
            return Total(summed(values), values.numel())
        if len(weights) > 1 or shapes[1] != shapes[0]:
            raise LossError(
                f"Expected {self._name} to return values and weights of one shape, got {shapes}. "
                "Return (values, weights), where mask.expand_as(values) makes a mask as large."
            )
        return Total(summed(values * weights[0]), summed(weights[0]))

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)
