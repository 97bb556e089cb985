"""The bytes of a step whose blocks differ in policy, composed of steps in which all have the same."""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

KEEP = "keep"


Shared = tuple[int, int]  # an output of a block: segment in which it is made, and which of its outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a step that belongs to one block, or to none."""

    block: str  # name of the block; "" for what lies between blocks
    place: tuple[str, int]  # what tells it from the other segments of the step: phase and micro-batch
    net: int  # bytes more alive at its end than at its start
    peak: int  # bytes more alive at its highest moment than at its start, at least 0
    seconds: float = 0.0  # how long it takes
    cheap: float = 0.0  # of these, all but those of matrix products, convolutions and attention
    # outputs of other blocks that end here, and their bytes
    ends: Mapping[Shared, int] = field(default_factory=dict[Shared, int])
    peak_without: int = 0  # the highest moment if they did not
    # bytes that come here for the sake of another block, by its name, or go if negative: what is moved to
    # the host goes while the next block computes, and comes back just before its own backward
    others: Mapping[str, int] = field(default_factory=dict[str, int])

    def with_others(self, wanted: Mapping[str, int]) -> "Segment":
        """The segment when other blocks have other policies.

        Example:
            >>> own = Segment(block="b", place=("backward", 0), net=9, peak=9, others={"a": 4})
            >>> alone = own.with_others({})
            >>> alone.net, alone.peak
            (5, 5)
        """
        if wanted == self.others:
            return self
        come = sum(size for size in wanted.values() if size > 0)
        come -= sum(size for size in self.others.values() if size > 0)  # before the highest moment
        return replace(
            self,
            net=self.net + sum(wanted.values()) - sum(self.others.values()),
            peak=max(0, self.peak + come),
            peak_without=max(0, self.peak_without + come),
            others=wanted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a block hands on, and others may hold longer than itself."""

    block: str  # that makes it
    bytes: int  # of it
    kept_by: frozenset[str]  # policies under which the block itself holds it until its own backward
    user: str  # the block that needs it last, if not itself; "" for what lies between blocks
    # the segment with which it then ends, by policy of that block, where that is known
    ends: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Steps that differ only in the policy of all their blocks, segment by segment.

    A block evaluates on its own: what it leaves alive for its backward, and what its backward needs for a
    moment, depends on its own policy and not on that of the others. So bytes of any mixture are sums of those
    of the pure steps, but for outputs, which the block itself or the next one holds, or both: they are
    counted one by one.

    Example:
        >>> def of(net, peak):
        ...     return [Segment(block="a", place=("forward", 0), net=net, peak=peak)]
        >>> mixture = Mixture(start=10, segments={"keep": of(5, 6), "recompute": of(1, 6)})
        >>> mixture.peak({}), mixture.blocks
        (16, ('a',))
    """

    start: int  # bytes alive before the first segment
    # of each policy, the same segments in the same order; "keep" is among them
    segments: Mapping[str, Sequence[Segment]]
    outputs: Mapping[Shared, Output] = field(default_factory=dict[Shared, Output])  # what blocks hand on
    blocks: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        kept = self.segments[KEEP]
        places = [(segment.block, segment.place) for segment in kept]
        for policy, segments in self.segments.items():
            if [(segment.block, segment.place) for segment in segments] != places:
                raise ValueError(f"Expected the segments of {KEEP!r}, got others for {policy!r}. Trace anew.")
        object.__setattr__(self, "blocks", tuple(dict.fromkeys(s.block for s in kept if s.block)))

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies there are, "keep" among them."""
        return tuple(self.segments)

    def of(self, choice: Mapping[str, str]) -> list[Segment]:
        """The segments of one mixture; blocks not named are kept."""
        found: list[Segment] = []
        for kept, every in zip(self.segments[KEEP], self.places(), strict=True):
            wanted = {
                block: size
                for policy, segment in every.items()
                for block, size in segment.others.items()
                if choice.get(block, KEEP) == policy
            }
            found.append(every[choice.get(kept.block, KEEP)].with_others(wanted))
        return found

    def places(self) -> list[dict[str, Segment]]:
        """The segments in order, each under all policies."""
        return [
            dict(zip(self.segments, every, strict=True))
            for every in zip(*self.segments.values(), strict=True)
        ]

    def peak(self, choice: Mapping[str, str], *, phase: str = "") -> int:
        """The most bytes alive at any moment, or at any of one phase."""
        live = self.start
        highest = 0 if phase else live
        due = self._due(choice)
        for index, segment in enumerate(self.of(choice)):
            peak, net = segment.peak, segment.net
            for shared, size in segment.ends.items():
                if shared not in due.get(index, ()):  # in this mixture it does not end here
                    peak, net = max(peak, segment.peak_without), net + size
            if segment.place[0] == phase or not phase:
                highest = max(highest, live + peak)
            ending = [shared for shared in due.get(index, ()) if shared not in segment.ends]
            live += net - sum(self.outputs[shared].bytes for shared in ending)
        return highest

    def seconds(self, choice: Mapping[str, str]) -> float:
        """How long all segments take."""
        return sum(segment.seconds for segment in self.of(choice))

    def least_seconds(self, budget: int, *, may_move: bool = False) -> float:
        """Seconds that hardly any choice within the budget stays below, also of policies not recorded here.

        Who frees all that a block leaves for its backward does its forward again, but for products that may
        be kept: what is cheap in it, at least, or what a policy takes that is known. Bytes are freed where
        that costs least, down to the last one, as in the continuous knapsack problem.
        """
        left = dict.fromkeys(self.blocks, 0)  # bytes, of one micro-batch
        spent = dict.fromkeys(self.blocks, 0.0)  # seconds, of all of them
        for segment in self.segments[KEEP]:
            if segment.block and segment.place[0] == "forward":
                spent[segment.block] += 0.0 if may_move else segment.cheap
                left[segment.block] += segment.net if segment.place[1] <= 0 else 0  # for each call
        for policy in self.policies[1:]:
            for block in self.blocks:
                spent[block] = min(spent[block], self._more_seconds(block, policy))
        over, least = self.peak({}) - budget, self.seconds({})
        if over > sum(max(0, size) for size in left.values()):
            return inf
        for price, size in sorted((spent[block] / size, size) for block, size in left.items() if size > 0):
            least += price * max(0, min(size, over))
            over -= size
        return least

    def _more_seconds(self, block: str, policy: str) -> float:
        """How much longer a block takes under a policy than where it is kept."""
        pairs = zip(self.segments[policy], self.segments[KEEP], strict=True)
        return max(0.0, sum(one.seconds - kept.seconds for one, kept in pairs if kept.block == block))

    def _due(self, choice: Mapping[str, str]) -> dict[int, list[Shared]]:
        """Outputs that end with a segment of others, because their own blocks do not hold them."""
        due: dict[int, list[Shared]] = {}
        for shared, output in self.outputs.items():
            if choice.get(output.block, KEEP) not in output.kept_by:
                at = output.ends.get(choice.get(output.user, KEEP), max(output.ends.values()))
                due.setdefault(at, []).append(shared)
        return due


# ---- the fastest mixture within a budget


SOLVER_SECONDS = 2.0  # for one program; what was found by then is taken
PROGRAMS = 5  # solved for one budget at most
SLACK = 0.003  # of the budget: not worth another program
GAP = 0.002  # of the seconds added: nobody can measure less


class Row(NamedTuple):
    """What is alive at the highest moment of one segment: a constant and a part for each choice."""

    constant: float
    parts: dict[tuple[str, str], float]


def fastest(mixture: Mixture, budget: int) -> dict[str, str] | None:
    """The policies of the blocks with which a step takes least time within the budget; None if none fits.

    Minimize the sum of each block's seconds, subject to one inequality for the highest moment of each
    segment: both are linear in the choices, one policy for each block.
    """
    if mixture.peak({}) <= budget:
        return {}
    # The program adds up what the mixture counts one by one; where they differ its budget is moved.
    best: dict[str, str] | None = None
    allowed = budget
    for _ in range(PROGRAMS):
        choice = _solve(mixture, allowed)
        if choice is None:
            break
        peak = mixture.peak(choice)
        if peak <= budget:
            best = choice
            if added_up(mixture, choice) - peak <= (allowed - budget) + SLACK * budget:
                break
            allowed = budget + added_up(mixture, choice) - peak
        elif best is not None:
            break
        else:
            allowed -= peak - budget
    return best


def added_up(mixture: Mixture, choice: Mapping[str, str]) -> int:
    """The peak as the program has it: the sum of what each block adds."""
    live = highest = mixture.start
    for segment in mixture.of(choice):
        highest = max(highest, live + segment.peak)
        live += segment.net
    return highest


def smallest(mixture: Mixture) -> dict[str, str]:
    """The policies with which the peak is least."""
    found = _solve(mixture, None) or {}
    uniform = [dict.fromkeys(mixture.blocks, policy) for policy in mixture.policies if policy != KEEP]
    return min([{}, *uniform, found], key=lambda choice: (mixture.peak(choice), mixture.seconds(choice)))


def _solve(mixture: Mixture, budget: int | None) -> dict[str, str] | None:
    """With a budget the least seconds; without one the least peak, which is then a variable of its own."""
    if not mixture.blocks:
        return {} if budget is None else None
    # Importing SciPy takes a moment, and most steps need no program.
    import numpy as np
    from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

    scipy: Any = optimize
    choices = [(block, policy) for block in mixture.blocks for policy in mixture.policies]
    rows = _rows(mixture)
    unit = (
        float(max(abs(row.constant) for row in rows)) or 1.0
    )  # bytes are too large for a solver's tolerance
    alive = np.array([[row.parts.get(choice, 0.0) for choice in choices] for row in rows]) / unit
    constants = np.array([row.constant for row in rows]) / unit
    one_each = np.array([[float(block == own) for own, _ in choices] for block in mixture.blocks])
    cost = np.array([_seconds(mixture, choice) for choice in choices])
    constraints = [scipy.LinearConstraint(one_each, 1, 1)]
    if budget is None:
        cost = cost / (cost.sum() or 1.0) * 1e-6  # of plans with the same peak the faster one
        cost = np.append(cost, 1.0)
        alive = np.hstack([alive, -np.ones((len(rows), 1))])
        constraints = [
            scipy.LinearConstraint(np.hstack([one_each, np.zeros((len(mixture.blocks), 1))]), 1, 1)
        ]
    limits = (budget / unit if budget is not None else 0.0) - constants
    constraints.append(scipy.LinearConstraint(alive, -np.inf, limits))
    integrality = np.array([1.0] * len(choices) + [0.0] * (budget is None))
    upper = np.array([1.0] * len(choices) + [np.inf] * (budget is None))
    with _quiet():
        found = scipy.milp(
            cost,
            constraints=constraints,
            integrality=integrality,
            bounds=scipy.Bounds(np.zeros_like(upper), upper),
            options={"time_limit": SOLVER_SECONDS, "mip_rel_gap": GAP},
        )
    if found.x is None:
        return None
    return _read(found.x, choices)


@contextmanager
def _quiet() -> Generator[None]:
    """Nothing on standard output, where some versions of HiGHS print, whatever they are told."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _read(values: Sequence[Any], choices: Sequence[tuple[str, str]]) -> dict[str, str]:
    taken = {
        block: policy for value, (block, policy) in zip(values, choices, strict=False) if float(value) > 0.5
    }
    return {block: policy for block, policy in taken.items() if policy != KEEP}


def _rows(mixture: Mixture) -> list[Row]:
    """What is alive at the highest moment of each segment, as a function of the choices."""
    rows: list[Row] = []
    constant, parts = float(mixture.start), dict[tuple[str, str], float]()
    for own in mixture.places():
        block = own[KEEP].block
        here, constant_here = dict(parts), constant + (0 if block else own[KEEP].peak)
        constant += 0 if block else own[KEEP].net
        for policy, segment in own.items() if block else ():
            alone = segment.with_others({})
            _add(here, (block, policy), alone.peak)
            _add(parts, (block, policy), alone.net)
        for policy, segment in own.items():
            for other, size in segment.others.items():
                _add(here, (other, policy), max(0, size))
                _add(parts, (other, policy), size)
        rows.append(Row(constant_here, here))
    return rows


def _add(parts: dict[tuple[str, str], float], choice: tuple[str, str], size: int) -> None:
    parts[choice] = parts.get(choice, 0.0) + size


def _seconds(mixture: Mixture, choice: tuple[str, str]) -> float:
    block, policy = choice
    return sum(segment.seconds for segment in mixture.segments[policy] if segment.block == block)


def as_choice(found: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """As a plan holds it."""
    return tuple(found.items())
