"""Judges raw results: every threshold with what was measured, and whether it holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isnan, nan

import torch

from anybatch.testing import tolerance
from benchmarks.ratios import Ratio, paired_ratio, total
from benchmarks.results import Head, Memory, Race, Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One threshold: `measured` must not exceed `limit`, unless it is `equal` to what it is compared with."""

    what: str
    measured: float
    limit: float
    equal: bool = False

    @property
    def holds(self) -> bool:
        """Whether the threshold holds; a NaN never does."""
        return self.equal or self.measured <= self.limit


def ratio(race: Race, name: str, clock: str) -> Ratio:
    """The median ratio of `name` to the hand-written loop; `clock` is "wall" or "cpu"."""
    return paired_ratio(*race.paired(name, clock))


def over(race: Race, updates: int) -> float:
    """Return the CPU time of the first `updates` over the hand-written loop's, NaN where not measured."""
    if not race.training.get("hand"):
        return nan
    spent = {name: sum(total(one, updates) for one in every) for name, every in race.training.items()}
    return spent["anybatch"] / spent["hand"]


def growth(memory: Memory, name: str) -> float:
    """How far the peak at many micro-batches is from that at few, relative, without what is held all along.

    Stricter than the whole peak: parameters and optimizer state would hide what micro-batches leave behind.
    """
    few, many = memory.few[name] - memory.held, memory.many[name] - memory.held
    return abs(many / few - 1)


def head_time(head: Head) -> Ratio:
    """The median ratio of the time in blocks to that with all logits at once."""
    return paired_ratio(head.wall["anybatch"], head.wall["hand"])


def time_of(race: Race) -> Verdict | None:
    """The judgement of anybatch's CPU time, where the case has a limit."""
    case, time = race.case, ratio(race, "anybatch", "cpu")
    if case.threshold is None:
        return None
    return Verdict(
        what=f"{case.name}: CPU time over the hand-written loop's",
        measured=time.median,
        limit=case.threshold,
        equal=case.or_equal and time.low <= 1 <= time.high,
    )


def judge(raw: Raw) -> Iterator[Verdict]:
    """All thresholds of a run. Races are judged by CPU time, which other programs disturb less."""
    for race in raw.races:
        verdict = time_of(race)
        if verdict is not None:
            yield verdict
        if race.case.thousand is not None and race.training.get("hand"):
            yield Verdict(
                what=f"{race.case.name}: CPU time of 1,000 updates over the hand-written loop's",
                measured=over(race, 1_000),
                limit=race.case.thousand,
            )
        yield Verdict(
            what=f"{race.case.name}: trained weights beside the hand-written loop's",
            measured=race.difference,
            limit=tolerance(torch.float32, race.updates * race.case.micro_batches),
        )
    for memory in raw.memory:
        case = memory.case
        yield Verdict(
            what=f"{case.task}: growth of the peak, {case.few} to {case.many} micro-batches",
            measured=growth(memory, "anybatch"),
            limit=case.tolerance,
        )
    for head in raw.heads:
        case, name = head.case, f"head of {head.case.vocabulary:,} words"
        yield Verdict(what=f"{name}: time", measured=head_time(head).median, limit=case.time)
        peak = head.peak["anybatch"] / head.peak["hand"]
        yield Verdict(what=f"{name}: peak bytes", measured=peak, limit=case.peak)
        yield Verdict(what=f"{name}: error", measured=_worst(head.error.values()), limit=case.error)
    for exactness in raw.exactness:
        for name in ("hand", "anybatch"):
            yield Verdict(
                what=f"{exactness.task}: gradient error of {name}, unequal weights",
                measured=exactness.gradient[name],
                limit=raw.gradient_error,
            )
        yield Verdict(
            what=f"{exactness.task}: all contestants end at the same parameters, equal weights",
            measured=_worst(exactness.parameters.values()),
            limit=raw.parameter_error,
        )


def _worst(errors: Iterable[float]) -> float:
    values = list(errors)  # `max` alone may pass over a NaN
    return nan if any(isnan(value) for value in values) else max(values)
