"""Medians of paired ratios and their exact intervals; sums of updates by the calendar of comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, median

from anybatch.engine import is_due


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A median ratio of `pairs` paired measurements and its 95 % interval."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def width(self) -> float:
        """Width of the interval relative to the median."""
        return (self.high - self.low) / self.median


def paired_ratio(measured: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The median of `measured[i] / reference[i]`, measured close in time, so that slow moments cancel."""
    ratios = sorted(m / r for m, r in zip(measured, reference, strict=True))
    low = interval_rank(len(ratios))
    return Ratio(median=median(ratios), low=ratios[low], high=ratios[-1 - low], pairs=len(ratios))


def interval_rank(count: int, *, confidence: float = 0.95) -> int:
    """The k for which the k-th smallest and k-th largest (from 0) of `count` values enclose the median.

    Each value lies below the true median with probability 1/2 whatever its distribution, so the number below
    is binomial; k is the largest that keeps both tails within `1 - confidence`. With 5 values or fewer no k
    does, and 0, the whole range, is returned.

    Source: W. R. Thompson, "On confidence ranges for the median", Annals of Mathematical Statistics 7 (1936).
    """
    most = (1 - confidence) / 2 * 2**count
    tail, rank = 1, 0  # tail = number of outcomes with at most `rank` values below the median
    while tail + comb(count, rank + 1) <= most:
        rank += 1
        tail += comb(count, rank)
    return rank


def total(seconds: Sequence[float], updates: int) -> float:
    """Return the seconds of the first `updates`, of which `seconds` holds at least 128, one by one.

    Updates beyond the measured ones take what those of their kind took: a compared one as update 128, another
    as the mean of the plain ones from 65 on.
    """
    plain = fmean(spent for n, spent in enumerate(seconds, start=1) if n > 64 and not is_due(n))
    beyond = [*map(is_due, range(len(seconds) + 1, updates + 1))]
    return sum(seconds[:updates]) + sum(seconds[127] if compared else plain for compared in beyond)
