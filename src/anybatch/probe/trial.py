"""The verdict: the same rows in several cuts, held against the whole batch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anybatch.probe.cut import Cut
from anybatch.probe.passes import Bench, Passed
from anybatch.tolerance import tolerance

# Deep networks lose more than the table's few layers; what a wrong denominator does is larger by far. Short
# dtypes have nothing to give.
_SLACK = {torch.float64: 16, torch.float32: 16}
_TABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """One cut held against what it should be.

    Attributes:
        cut: the rows and how they are parted.
        passed: what came of it.
        error: of the gradient, relative.
        loss_error: of the loss, relative.
        words: what the cut is called.
    """

    cut: Cut
    passed: Passed
    error: float
    loss_error: float
    words: str

    def holds(self, limit: float) -> bool:
        """Whether both errors are rounding."""
        return self.error <= limit and self.loss_error <= limit


def cut_sizes_to_try(rows: int, micro_batch: int | None) -> list[int]:
    """Sizes of micro-batches: the caller's, two that leave a short one at the end, and 1.

    Example:
        >>> cut_sizes_to_try(8, None), cut_sizes_to_try(3, None), cut_sizes_to_try(8, 4)
        ([3, 5, 1], [2, 1], [4, 3, 5, 1])
    """
    ragged = [size for size in range(2, rows) if rows % size]
    near = [min(ragged, key=lambda size: abs(size - share * rows)) for share in (3 / 8, 5 / 8) if ragged]
    own = [micro_batch] if micro_batch is not None and micro_batch < rows else []
    return list(dict.fromkeys((*own, *near, 1)))


def limit_of(dtypes: Iterable[torch.dtype], rows: int) -> float:
    """What counts as rounding, by the shortest dtype that was computed in.

    Example:
        >>> limit_of([torch.float64], 8) < 1e-11 < limit_of([torch.float64, torch.float32], 8)
        True
    """
    shortest = next((dtype for dtype in _TABLE if dtype in set(dtypes)), torch.float32)
    return tolerance(shortest, rows) * _SLACK.get(shortest, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Court:
    """Holds passes against a reference.

    Args:
        bench: where passes are made.
        whole: all rows, uncut.
        reference: what came of them.
    """

    bench: Bench
    whole: Cut
    reference: Passed
    _scales: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    @property
    def limit(self) -> float:
        """What counts as rounding in these passes."""
        dtypes = {parameter.dtype for parameter in self.bench.subject.named.values()}
        return limit_of(dtypes | self.bench.draws.dtypes, len(self.whole.part.rows))

    def cut_by(self, micro_batch: int) -> Trial:
        """The same rows in micro-batches of a size."""
        return self.try_cut(replace(self.whole, micro_batch=micro_batch), self.reference)

    def try_cut(self, cut: Cut, reference: Passed, words: str = "") -> Trial:
        """Any cut, held against any reference."""
        passed = self.bench.run(cut)
        words = words or cut.words
        if passed.error is not None or reference.error is not None:
            return Trial(cut=cut, passed=passed, error=math.inf, loss_error=math.inf, words=words)
        error, loss_error = self._errors(passed, reference, (0.0, 0.0))
        if max(error, loss_error) > self.limit:
            # A trained model's gradient is small because those of its rows cancel: their size is what rounds.
            error, loss_error = self._errors(passed, reference, self._scale())
        return Trial(cut=cut, passed=passed, error=error, loss_error=loss_error, words=words)

    def _errors(self, passed: Passed, wanted: Passed, least: tuple[float, float]) -> tuple[float, float]:
        size = max(_norm(wanted.gradients.values()), least[0])
        names = passed.gradients.keys() | wanted.gradients.keys()
        apart = _norm(_difference(passed.gradients, wanted.gradients, name) for name in sorted(names))
        loss_size = max(abs(wanted.loss), wanted.scale, least[1])
        loss_apart = abs(passed.loss - wanted.loss)
        if math.isnan(passed.loss) and math.isnan(wanted.loss):
            loss_apart = 0.0
        return _ratio(apart, size), _ratio(loss_apart, loss_size)

    def _scale(self) -> tuple[float, float]:
        """The size of gradient and loss of either half of the rows."""
        if not self._scales:
            rows = range(len(self.whole.part.rows))
            middle = len(rows) // 2
            halves = [self.bench.run(self.whole.only(half)) for half in (rows[:middle], rows[middle:])]
            sound = [half for half in halves if half.error is None and half.weighed]
            self._scales.append(
                (
                    max((_norm(half.gradients.values()) for half in sound), default=0.0),
                    max((half.scale for half in sound), default=0.0),
                )
            )
        return self._scales[0]


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in one:
        return other[name]
    return one[name] - other[name] if name in other else one[name]


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*[torch.linalg.vector_norm(value.detach().double()).item() for value in tensors])


def _ratio(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)
