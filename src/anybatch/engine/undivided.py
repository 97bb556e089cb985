"""Sums of gradients of some rows, not divided: for a server, which divides by the weight of all rows"""

from typing import NamedTuple

from anybatch.core import torch_private as private
from anybatch.engine.accumulate import Accumulator
from anybatch.engine.gradients import Sums


class Undivided(NamedTuple):
    """Sums of gradients of some rows."""

    banks: list[Sums]  # of each term that has a divisor of its own
    coefficients: dict[str, float]  # the factor of each of these terms; none where the sums are divided


def undivided(sums: Accumulator) -> Undivided:
    """The gradient sums of the rows here, times what stands in for their divisors. They are used up."""
    division = sums._division  # pyright: ignore[reportPrivateUsage]
    if sums.gradients is None:
        return Undivided([], {})
    sums.gradients.close()
    banks, sums.gradients = sums.gradients.gradients().banks, None
    if division.divisors is not None:
        return Undivided([*banks.values()], {})
    for name, factor in division.provisional.items():
        if banks.get(name) and factor != 1.0:
            private.foreach_mul_([*banks[name].values()], factor)
    names = [*division.provisional]
    coefficients = {name: float(division.coefficients[name]) for name in names}
    return Undivided([banks.get(name, {}) for name in names], coefficients)
