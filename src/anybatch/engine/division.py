"""What divides each term of a loss, and when: early where the batch tells it, else at the end."""

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
    """What divides each term: decided after the first forward of a step or of a window.

    Where the weight of the whole batch is known from the batch, it divides what flows back (early): with one
    micro-batch that is torch's own arithmetic, bit for bit. Where it is not known before the end (late), a
    power of two near the weight of the first micro-batch stands in for it, and `factors` multiplies by that
    over the weight: powers of two change no digit, and float16 does not overflow. Where backward adds over
    ranks, 1 stands in on all of them.
    """

    coefficients: Mapping[str, float]  # the factor of each term in the loss
    divisors: Mapping[str, Number] | None  # of each term; None where they are not known before the end
    provisional: Mapping[str, float]  # what stands in for them until then
    is_counted: bool  # the divisors are exact without weighing the micro-batches
    is_divided: bool  # the sums are divided already
    # dtype and device of each sum
    like: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict[str, Any])
    # what flows into each sum, by loss scale
    cotangents: dict[float, dict[str, Tensor]] = field(default_factory=dict[float, dict[str, Tensor]])

    @staticmethod
    def decide(
        loss: Loss, batch: Batch, terms: Evaluated, rows: int, *, is_synced: bool = False
    ) -> "Division":
        """Ask a loss what divides the terms of this batch, after the forward of its first rows."""
        divisors = loss.divisors(batch, terms, rows)
        weights = terms.weigh() if divisors is None else {}
        return Division(
            coefficients=dict.fromkeys(terms.sums, 1.0) | {**loss.coefficients},
            divisors=divisors,
            provisional={
                name: 1.0 if is_synced else _stand_in(weight, rows) for name, weight in weights.items()
            },
            is_counted=loss.counted and divisors is not None,
            is_divided=loss.divided,
        )

    def made_cotangents(self, scale: float) -> dict[str, Tensor]:
        """What flows into each sum at this loss scale; made once for each scale."""
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

    def factors(self, weights: Mapping[str, float]) -> dict[str, float]:
        """What the gradient of each term is still to be multiplied by."""
        factors: dict[str, float] = {}
        if self.divisors is None:
            for name, provisional in self.provisional.items():
                weight = weights.get(name)
                factors[name] = self.coefficients[name] * provisional / weight if weight else 0.0
        return factors

    def plain(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        return {
            "coefficients": {name: float(value) for name, value in self.coefficients.items()},
            "provisional": dict(self.provisional),
            "divisors": None if self.divisors is None else to_host(self.divisors),
            "is_counted": self.is_counted,
            "is_divided": self.is_divided,
        }

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "Division":
        """What `plain` was given."""
        return Division(
            coefficients=dict(plain["coefficients"]),
            divisors=plain["divisors"],
            provisional=dict(plain["provisional"]),
            is_counted=bool(plain["is_counted"]),
            is_divided=bool(plain["is_divided"]),
        )


UNDECIDED = Division(coefficients={}, divisors=None, provisional={}, is_counted=False, is_divided=False)


def to_host(weights: Mapping[str, Number]) -> dict[str, float]:
    """Weights as numbers."""
    return dict(zip(weights, map(float, weights.values()), strict=True))


def _stand_in(weight: Number, rows: int) -> float:
    """The power of two nearest a micro-batch's weight; nearest its rows where a device would have to stop."""
    is_far = isinstance(weight, Tensor) and weight.device.type != "cpu"
    size = rows if is_far else float(weight) or rows
    return 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


def _cotangent(coefficient: float, divisor: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    """coefficient / divisor as a scalar like the sum it flows into; 0 where nothing is to be divided."""
    if isinstance(divisor, Tensor) and divisor.device.type == "cpu":
        divisor = divisor.item()  # no device has to stop for it
    if not isinstance(divisor, Tensor):
        return torch.full((), coefficient / divisor if divisor else 0.0, dtype=dtype, device=device)
    divisor = divisor.to(device, dtype)
    return torch.where(divisor == 0, 0, coefficient / divisor)
