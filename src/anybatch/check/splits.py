"""Splits compared with the whole batch: errors, the model's outputs row by row, and its state"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

from anybatch.check.finding import WAYS_OUT, Finding, listed
from anybatch.check.passes import Bench, Call, Calls, Pass, State
from anybatch.check.rows import RowCut, RowPart, agree, is_close
from anybatch.compare import distance, limit_of
from anybatch.losses import function_of

PLAIN = 1e-3  # larger errors are no rounding, unless the reference itself is rounding
# A smaller gradient may be rounding of numbers that cancel inside the model, as in a perfect fit.
_TINY = 1e-6


def worst_of(comparison: "Comparison", passes: Sequence[Pass]) -> Pass:
    """Return the first split that differs, if possible one that did not fail."""
    differing = [one for one in passes if not one.holds(comparison.limit)] or list(passes)
    return next((one for one in differing if one.failure is None), differing[0])


def name_of(loss: object) -> str:
    """Return the name of a loss."""
    held: Any = function_of(loss)
    held = cast("partial[Any]", held).func if isinstance(held, partial) else held
    name = getattr(held, "__qualname__", type(held).__qualname__)
    return name.rpartition("<locals>.")[2]


def cut_sizes_to_try(rows: int, micro_batch: int | None) -> list[int]:
    """Return sizes of micro-batches: the caller's, two that leave a smaller last one, and 1."""
    ragged = [size for size in range(2, rows) if rows % size]
    near = [min(ragged, key=lambda size: abs(size - share * rows)) for share in (3 / 8, 5 / 8) if ragged]
    own = [micro_batch] if micro_batch is not None and micro_batch < rows else []
    return list(dict.fromkeys((*own, *near, 1)))


class Comparison:
    """Passes in several splits, compared with a reference: the pass over all rows uncut."""

    def __init__(self, *, bench: Bench, whole: RowCut, reference: Pass) -> None:
        self.bench, self.whole, self.reference = bench, whole, reference

    @property
    def limit(self) -> float:
        """The largest relative error that counts as rounding."""
        return limit_of(self.reference.dtypes, len(self.whole.part.rows))

    @property
    def outermost(self) -> list[Call]:
        """The calls of the model in the reference, without those inside them."""
        return self.reference.calls.parts.get(self.whole.part, [])

    def cut_by(self, micro_batch: int) -> Pass:
        """Compare micro-batches of a size with the reference."""
        return self.compare(replace(self.whole, micro_batch=micro_batch), self.reference)

    def compare(self, cut: RowCut, reference: Pass, words: str = "") -> Pass:
        """Compare any split with any reference."""
        found = self.bench.run(cut)
        found.words = words or cut.words
        if found.failure is None and reference.failure is None:
            far = distance(reference, found)
            is_plain = far.gradient > PLAIN and 0 < found.largest < 10 * reference.size
            if max(far.gradient, far.loss) > self.limit and not is_plain:
                far = distance(reference, found, *self._halves)
            found.error, found.loss_error = far.gradient, far.loss
            if found.holds(self.limit) and not reference.bare:
                found.calls = Calls()  # no longer needed, and large
        return found

    @cached_property
    def doubt(self) -> str:
        """A remark if the gradients of all rows and of both halves are next to nothing; else empty."""
        tiny, size = min(self.limit, _TINY), self.reference.size
        if size >= tiny or any(half.size >= tiny for half in self._halves):
            return ""
        return f"the gradient of these rows is so small (norm {size:.1g}) that it may be rounding"

    @cached_property
    def _halves(self) -> list[Pass]:
        rows = range(len(self.whole.part.rows))
        middle = len(rows) // 2
        halves = [self.bench.run(self.whole.only(half)) for half in (rows[:middle], rows[middle:])]
        return [half for half in halves if half.failure is None and half.is_weighed]


def rows_agree(comparison: Comparison, whole: Calls, calls: Calls, parts: Sequence[RowPart]) -> bool:
    """Return True if the model gives each row the same outputs in the whole batch and in its parts."""
    tables = [calls.table(part) for part in parts]
    for call in whole.parts.get(comparison.whole.part, []):
        peers = [table[call.key].outputs for table in tables if call.key in table]
        if len(peers) < len(parts) or any(len(outputs) < len(call.outputs) for outputs in peers):
            return False
        for value, *pieces in zip(call.outputs, *peers, strict=False):
            if all(piece.shape == value.shape for piece in pieces):
                continue  # one value for all rows
            if not agree(value, list(zip(pieces, parts, strict=True)), 10 * comparison.limit):
                return False
    return True


def rows_agree_on(bench: Bench, comparison: Comparison, cut: RowCut) -> bool:
    """Return True if `rows_agree` in two new passes on a bench."""
    whole, parted = bench.run(comparison.whole), bench.run(cut)
    failed = whole.failure or parted.failure
    return not failed and rows_agree(comparison, whole.calls, parted.calls, cut.parts)


def find_state(comparison: Comparison, passes: Sequence[Pass]) -> list[Finding]:
    """Return a finding for each module whose saved buffers depend on the split."""
    whole = comparison.reference.state
    states = [one.state for one in passes if one.failure is None]
    saved: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for one in states for key in _differing(whole, one, comparison.limit)):
        saved.setdefault(key[0], []).append(f"`{key[1]}`")
    what = "A split batch leaves other values than the whole, by the number of micro-batches: {}."
    return [
        Finding(kind="buffer", culprit=culprit, what=what.format(listed(names)), ways_out=WAYS_OUT["buffer"])
        for culprit, names in saved.items()
    ]


def _differing(whole: State, other: State, limit: float) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys((*whole, *other)):
        values = [state[key] for state in (whole, other) if key in state]
        one, *rest = [value.double() if value.is_floating_point() else value for value in values]
        if not rest or not is_close(rest[0], one, 10 * limit):
            yield key
