"""The progress of a long planning, on standard error."""

import sys
import time
from collections.abc import Callable

from anybatch.core import counted, format_seconds
from anybatch.engine import Plan

_SILENT_S = 2.0
_EVERY_S = 1.0


class PlanningProgress:
    """The progress of one planning: silent for two seconds, then at most one line a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began, self._next_s = clock(), _SILENT_S

    def tell(self, plan: Plan, traced: int) -> None:
        """Print a line, if due, before a plan is traced; `traced` plans are done."""
        passed = self._clock() - self._began
        if passed >= self._next_s:
            self._next_s = passed + _EVERY_S
            sys.stderr.write(
                f"anybatch has been planning for {format_seconds(passed)}: {counted(traced, 'step')} traced, "
                f"next {counted(plan.rows, 'row')} in micro-batches of {plan.micro_batch}.\n"
            )
            sys.stderr.flush()
