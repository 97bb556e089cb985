"""Fold(init, add, merge, finish): the one abstraction and its law."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Generic, TypeVar

from anybatch.total import Number, Total

Item = TypeVar("Item")
State = TypeVar("State")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Generic[Item, State, Result]):
    """A sum that may be cut anywhere.

    The law: for items cut anywhere into `a` and `b`, `merge(collect(a), collect(b))` is `collect(a + b)`;
    `merge` is associative and commutative, and `init()` is its identity. Cut in time or in space, the result
    is the same.

    Args:
        init: makes the state of no items.
        add: takes a state and one item to the next state.
        merge: joins the states of two parts.
        finish: turns the state of all items into the result. The only place that divides.

    Example:
        >>> rows = Fold(init=int, add=lambda n, item: n + len(item), merge=lambda a, b: a + b, finish=float)
        >>> rows.run(["ab", "c"])
        3.0
        >>> rows.finish(rows.merge(rows.collect(["ab"]), rows.collect(["c"])))
        3.0
    """

    init: Callable[[], State]
    add: Callable[[State, Item], State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Result]

    def collect(self, items: Iterable[Item]) -> State:
        """The state after these items, not yet finished."""
        return reduce(self.add, items, self.init())

    def run(self, items: Iterable[Item]) -> Result:
        """Collect and finish."""
        return self.finish(self.collect(items))


def weighted_mean(measure: Callable[[Item], Total]) -> Fold[Item, Total, Number]:
    """The fold of a mean: sums and weights add up, and the division comes once, at the end.

    Args:
        measure: the total of one item, for instance of the outputs and targets of a micro-batch.

    Example:
        >>> lengths = weighted_mean(lambda words: Total(sum(map(len, words)), len(words)))
        >>> lengths.run([["a", "bcd"], ["ef", "g", "hijkl"]])
        2.4
    """
    return Fold(
        init=Total.zero,
        add=lambda total, item: total + measure(item),
        merge=lambda left, right: left + right,
        finish=lambda total: total.mean(),
    )
