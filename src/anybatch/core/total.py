"""Total(sum, weight) and Fold(init, add, merge, finish): sums over rows, divided once."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from numbers import Real
from operator import add
from typing import Generic, TypeVar

import torch
from torch import Tensor

from anybatch.core.errors import LossError

Number = int | float | Tensor

Item = TypeVar("Item")
State = TypeVar("State")
Result = TypeVar("Result")

# Not precise enough for sums: 65,536 losses of 10 overflow float16, and bfloat16 counts to 256.
SHORT_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """A sum over rows and its divisor, the weight.

    Totals of parts of a batch add up to the total of the batch: `+` is associative and commutative with the
    identity `Total.zero()`. Means do not add up, which is why a step asks for totals.

    Args:
        sum: the summed loss of these rows, a real scalar (tensor of shape () or number). float16 and bfloat16
            are converted to float32.
        weight: the share of these rows in the divisor of the *whole batch*: their number, their valid tokens,
            the sum of their class weights. At least 0, without gradient.

    Raises:
        LossError: the sum or the weight is not a real scalar, or the weight requires grad, is negative or not
            finite. (The value of a tensor weight is checked at the end of the step, without a
            synchronization here.)

    Example:
        >>> a, b = Total(6.0, 3), Total(2.0, 1)
        >>> (a + b).mean(), (a + Total.zero()).mean()
        (2.0, 2.0)
        >>> (0.5 * a).mean()  # a coefficient scales the sum, never the weight
        1.0
    """

    sum: Number
    weight: Number

    def __post_init__(self) -> None:
        _check_sum(self.sum)
        _check_weight(self.weight)
        if isinstance(self.sum, Tensor) and self.sum.dtype in SHORT_DTYPES:
            object.__setattr__(self, "sum", self.sum.float())

    @staticmethod
    def zero() -> "Total":
        """Return the total of no rows: the identity of `+`."""
        return Total(0, 0)

    def __add__(self, other: "Total") -> "Total":
        return Total(self.sum + other.sum, self.weight + other.weight)

    def __mul__(self, coefficient: float) -> "Total":
        return Total(self.sum * coefficient, self.weight)

    __rmul__ = __mul__

    def mean(self) -> Number:
        """Return the sum divided by the weight. The mean of no rows (weight 0) is NaN."""
        if isinstance(self.weight, Tensor) or self.weight != 0:
            return self.sum / self.weight
        return self.sum * math.nan


def _check_sum(value: object) -> None:
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise LossError(
                f"Expected the sum of a Total to be a scalar, got a tensor of shape {tuple(value.shape)}. "
                "Call .sum() on it; the weight says what it is divided by."
            )
        if value.is_complex():
            raise LossError(
                f"Expected the sum of a Total to be real, got {value.dtype}. "
                "Sum a real loss, such as a squared modulus."
            )
    elif not isinstance(value, Real):
        raise LossError(
            f"Expected the sum of a Total to be a scalar tensor or a number, got {type(value).__name__}. "
            "Sum the losses of the rows."
        )


def _check_weight(value: object) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise LossError(
                f"Expected a weight without gradient, got {value}. The weight is fixed by the data: "
                "use .detach(), or count it from the batch."
            )
        if value.dim() != 0 or value.is_complex():
            raise LossError(
                f"Expected a weight that is a real scalar, got shape {tuple(value.shape)}, {value.dtype}. "
                "Call .sum() on it."
            )
    elif not isinstance(value, Real):
        raise LossError(
            f"Expected a weight that is a number or a scalar tensor, got {type(value).__name__}. "
            "Count rows or valid tokens."
        )
    elif not (0 <= float(value) < math.inf):
        raise LossError(
            f"Expected a finite weight of at least 0, got {value}. "
            "A weight counts rows, tokens or class weights."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Generic[Item, State, Result]):
    """A reduction whose items may be cut anywhere.

    The law: for items cut anywhere into `a` and `b`, `merge(collect(a), collect(b))` is `collect(a + b)`;
    `merge` is associative and commutative, and `init()` is its identity. Cut in time or in space, the result
    is the same.

    Example:
        >>> rows = Fold(init=int, add=lambda n, item: n + len(item), merge=lambda a, b: a + b, finish=float)
        >>> rows.run(["ab", "c"])
        3.0
        >>> rows.finish(rows.merge(rows.collect(["ab"]), rows.collect(["c"])))
        3.0
    """

    init: Callable[[], State]  # returns the state of no items
    add: Callable[[State, Item], State]
    merge: Callable[[State, State], State]  # returns the state of two parts together
    finish: Callable[[State], Result]  # only this function divides

    def collect(self, items: Iterable[Item]) -> State:
        """Return the state after these items, not yet finished."""
        return reduce(self.add, items, self.init())

    def run(self, items: Iterable[Item]) -> Result:
        """Return the result over these items."""
        return self.finish(self.collect(items))


def weighted_mean(measure: Callable[[Item], Total]) -> Fold[Item, Total, Number]:
    """Return the fold of a mean: sums and weights add up, and the division comes once, at the end."""
    return Fold(
        init=Total.zero,
        add=lambda total, item: total + measure(item),
        merge=add,
        finish=Total.mean,
    )
