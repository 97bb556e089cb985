"""The cheapest policy of each block within a budget, as an integer program for SciPy's HiGHS solver."""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from anybatch.planner.mixture import KEEP, Mixture

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
