"""A race of micro-batches: the largest that fits against its half and its quarter."""

import statistics
from collections.abc import Callable

from anybatch.core import cut_sizes

PAIRS = 3  # comparisons before a verdict
_GAIN = 0.97  # the least gain: seconds per row of the winner over those of the largest


class Race:
    """A race of the largest micro-batch that fits against its half and quarter, by seconds per row.

    All of them run in the same step, the small ones first: the first micro-batch of a step makes the
    gradients and is not timed. If the batch fits uncut, a step of one micro-batch and a step of the small
    ones take turns. After three comparisons the fastest is kept, if it was 3 % faster in the median.
    """

    def __init__(self) -> None:
        self.level = 0  # halvings that have won
        self.is_over = False
        self._ratios: list[dict[int, float]] = []  # seconds per row of each level, over those of the largest
        self._alone: float | None = None  # seconds per row of the uncut step before
        self._levels: tuple[int, ...] = ()  # of the micro-batches of this step; empty without a race in it
        self._times: dict[int, list[float]] = {}

    @property
    def is_on(self) -> bool:
        """True if this step is a race."""
        return bool(self._levels)

    def cut(self, rows: int, top: int, fits: Callable[[int], bool]) -> tuple[int, ...]:
        """Return the micro-batches of a step that is a race; none if there is nothing to race."""
        self._levels, self._times = (), {}
        half, quarter = -(-top // 2), -(-top // 4)
        small = [quarter, quarter, top - 2 * quarter]
        if quarter == half or not all(map(fits, small)):
            small = [half, top - half]
        if self.is_over or half == top or not all(map(fits, small)):
            return ()
        if top == rows and self._alone is None:
            sizes, levels = [rows], [0]
        else:
            sizes = [*small, *cut_sizes(rows - top, top)] if rows > top else small
            levels = [_level(size, top) for size in sizes]
        self._levels = tuple(levels)
        return tuple(sizes)

    def time(self, index: int, rows: int, seconds: float) -> None:
        """Note the seconds of a micro-batch that was not read."""
        if index < len(self._levels) and (index or len(self._levels) == 1):
            self._times.setdefault(self._levels[index], []).append(seconds / rows)

    def finish(self) -> bool:
        """End a step; return True if another level has won."""
        found = {level: min(seconds) for level, seconds in self._times.items()}
        was_on, self._levels, self._times = self.is_on, (), {}
        if not was_on:
            return False
        largest = found.pop(0, None)
        if largest is not None and not found:
            self._alone = largest
        elif found:
            largest, self._alone = largest or self._alone, None
            self._ratios += [{level: one / largest for level, one in found.items()}] if largest else []
        if len(self._ratios) < PAIRS:
            return False
        shared = set[int].intersection(*map(set[int], self._ratios))
        by_level = {level: [one[level] for one in self._ratios] for level in shared}
        best = min(by_level, key=lambda level: statistics.median(by_level[level]), default=0)
        self.is_over = True
        if best and statistics.median(by_level[best]) < _GAIN and max(by_level[best]) < 1:
            self.level = best
        return self.level > 0


def _level(size: int, top: int) -> int:
    """Return the halvings of the largest that are nearest to a size."""
    return 0 if 4 * size > 3 * top else 1 if 8 * size > 3 * top else 2
