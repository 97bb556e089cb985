"""Plans raced in real steps: each of a few is carried out some times, then the fastest stays."""

import statistics
from collections.abc import Sequence

from anybatch.engine import Plan

ROUNDS = 4  # steps of each plan; the first of them warms caches up
HOPELESS = 1.3  # times the fastest, after which a plan is not tried again


class Contest:
    """Which of several plans is fastest, found out in steps that are made anyway.

    All of them give the same result, up to the order of additions, so no step is wasted.

    Args:
        plans: at least one, the likeliest first.

    Example:
        >>> slow, fast = Plan(rows=8, micro_batch=1), Plan(rows=8, micro_batch=4)
        >>> contest = Contest([slow, fast])
        >>> while not contest.is_settled:
        ...     plan = contest.plan
        ...     contest.note(plan, 8.0 / plan.micro_batch)
        >>> contest.plan == fast
        True
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._seconds: dict[Plan, list[float]] = {plan: [] for plan in plans}

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to find out."""
        return len(self._left) == 1 or all(len(self._seconds[plan]) >= ROUNDS for plan in self._left)

    @property
    def plan(self) -> Plan:
        """The one to be carried out next."""
        if self.is_settled:
            return self.fastest
        return min(self._left, key=lambda plan: len(self._seconds[plan]))

    @property
    def fastest(self) -> Plan:
        """The fastest so far; the likeliest where nothing is known."""
        return min(self._left, key=self._typical)

    def note(self, plan: Plan, seconds: float) -> None:
        """How long a step took.

        Args:
            plan: of this contest; others are ignored.
            seconds: for each row.
        """
        if plan in self._seconds:
            self._seconds[plan].append(seconds)

    @property
    def _left(self) -> list[Plan]:
        tried = [plan for plan, seconds in self._seconds.items() if len(seconds) > 1]
        if len(tried) < 2:
            return list(self._seconds)
        limit = HOPELESS * min(self._typical(plan) for plan in tried)
        return [plan for plan in self._seconds if plan not in tried or self._typical(plan) <= limit]

    def _typical(self, plan: Plan) -> float:
        seconds = self._seconds[plan]
        return statistics.median(seconds[1:] or seconds or [0.0])
