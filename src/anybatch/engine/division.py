"""The divisor of each term of a loss: known early if the batch tells the weight, else at the end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Batch, Number
from anybatch.losses import Evaluated, Loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """The divisor of each loss term, fixed after the first forward of a step or window.

    If the weight of the whole batch is known from the batch, it divides the cotangent (early): with one
    micro-batch that is torch's own arithmetic, bit for bit. If it is known at the end only (late), the
    cotangent is divided by a provisional divisor, a power of two near the weight of the first micro-batch,
    and `factors` multiplies the sums by provisional / weight. Powers of two change no digit, and float16 does
    not overflow. If backward adds over ranks (SyncBatchNorm, shards), the provisional divisor is 1 on all.
    """

    coefficients: Mapping[str, float]  # the factor of each term in the loss
    divisors: Mapping[str, Number] | None  # of each term; None if they are known at the end only
    provisional: Mapping[str, float]  # the powers of two used until then
    is_counted: bool  # the divisors are exact without weighing the micro-batches
    is_divided: bool  # the sums are divided already
    # dtype and device of each sum
    like: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict[str, Any])
    # the cotangent of each sum, by loss scale
    cotangents: dict[float, dict[str, Tensor]] = field(default_factory=dict[float, dict[str, Tensor]])

    @staticmethod
    def decide(loss: Loss, batch: Batch, terms: Evaluated, rows: int, *, guess: float = 1.0) -> "Division":
        """Ask a loss for the divisors of this batch, after the forward of its first rows.

        `guess` is the factor of the provisional divisor, which is 1 if it is 0.
        """
        divisors = loss.divisors(batch, terms, rows)
        weights = terms.weigh() if divisors is None else {}
        return Division(
            coefficients=dict.fromkeys(terms.sums, 1.0) | {**loss.coefficients},
            divisors=divisors,
            provisional={
                name: guess * _stand_in(weight, rows) if guess else 1.0 for name, weight in weights.items()
            },
            is_counted=loss.counted and divisors is not None,
            is_divided=loss.divided,
        )

    def made_cotangents(self, scale: float) -> dict[str, Tensor]:
        """Make the cotangent of each sum at this loss scale."""
        made: dict[str, Tensor] = {}
        for name, (dtype, device) in self.like.items():
            if self.divisors is None:
                made[name] = torch.full((), scale / self.provisional[name], dtype=dtype, device=device)
            else:
                divisor = 1 if self.is_divided else self.divisors[name]
                cotangent = _cotangent(self.coefficients[name], divisor, dtype, device)
                made[name] = cotangent if scale == 1.0 else cotangent * scale
        self.cotangents[scale] = made
        return made

    def factors(self, weights: Mapping[str, Number]) -> dict[str, Number]:
        """Return the factor by which the gradient sums of each term are still to be multiplied."""
        if self.divisors is not None:
            return {}
        return {
            name: _quotient(self.coefficients[name] * provisional, weights.get(name, 0.0))
            for name, provisional in self.provisional.items()
        }


UNDECIDED = Division(coefficients={}, divisors=None, provisional={}, is_counted=False, is_divided=False)


def to_host(weights: Mapping[str, Number]) -> dict[str, float]:
    """Return weights as numbers."""
    return dict(zip(weights, map(float, weights.values()), strict=True))


def _stand_in(weight: Number, rows: int) -> float:
    """Return the power of two nearest a weight on the host, or nearest the rows: a device need not stop."""
    is_far = isinstance(weight, Tensor) and weight.device.type != "cpu"
    size = rows if is_far else float(weight) or rows
    return 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


def _cotangent(coefficient: float, divisor: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return coefficient / divisor as a scalar like the sum it flows into; 0 if nothing is to be divided."""
    if isinstance(divisor, Tensor) and divisor.device.type != "cpu":
        divisor = divisor.to(device, dtype)
    value = _quotient(coefficient, divisor)
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def _quotient(coefficient: float, divisor: Number) -> Number:
    """Return coefficient / divisor, or 0 if the divisor is 0; on its device, which need not stop for it."""
    if isinstance(divisor, Tensor) and divisor.device.type != "cpu":
        return torch.where(divisor == 0, 0, coefficient / divisor)
    return coefficient / float(divisor) if divisor else 0.0
