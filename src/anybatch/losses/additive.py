"""A loss whose micro-batches simply add up: it is divided by a total known beforehand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.core import Batch, LossError, Number, Total
from anybatch.losses.loss import Evaluated, Plain
from anybatch.losses.terms import call_loss


@dataclass(frozen=True, slots=True)
class Additive(Plain):
    """A loss that is divided already by a total of the whole batch, so that micro-batches add up.

    The divisor is known before the step: a constant, or the number of tokens of the batch, counted outside.
    The loss of the batch is the sum of what the function returns for its micro-batches; that of several ranks
    is the sum over ranks, and evaluation adds up over all rows. Uncut, it is the function's value, to the
    bit. The step compares splits of a few rows before the first cut, and refuses a mean. With
    `Step(check=False)` it takes the caller's word.

    Args:
        function: takes the model and a micro-batch, returns a real scalar tensor of shape ().

    Raises:
        LossError: the function cannot be called, or returns something else.

    Example:
        >>> import anybatch as ab
        >>> from torch import ones, optim, zeros
        >>> def loss(model, micro):
        ...     return (model(micro[0]) - micro[1]).square().sum() / 512  # rows of every batch
        >>> model = nn.Linear(2, 1)
        >>> step = ab.Step(model, Additive(loss), optim.SGD(model.parameters(), lr=0.1), micro_batch=128)
        >>> step((ones(512, 2), zeros(512, 1))).micro_batches
        4
    """

    function: Callable[[nn.Module, Any], Tensor]

    divided = False

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise LossError(
                f"Expected a function (model, micro) with a scalar that adds up, got {self.function!r}. "
                "Divide by a number that is the same for every micro-batch."
            )

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Call the function and check that it returned a scalar."""
        value: Any = call_loss(self.function, model, micro)
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            came = (
                f"shape {tuple(value.shape)}, {value.dtype}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise LossError(
                f"Expected a real scalar tensor, of shape (), from a function in ab.Additive, got {came}. "
                "Sum it and divide by the total of the batch; an ab.Total needs no ab.Additive."
            )
        # A micro-batch has no weight of its own.
        return Evaluated({"loss": Total(value, 0).sum}, lambda: {"loss": 0})  # widens float16

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number]:
        """Return 1: nothing is left to divide."""
        return {"loss": 1}
