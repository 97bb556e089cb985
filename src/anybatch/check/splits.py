"""Splits compared with the whole batch: errors, the model's outputs row by row, and its state"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from anybatch.check.finding import WAYS_OUT, Finding, listed
from anybatch.check.passes import Bench, Call, Calls, Key, Pass, State
from anybatch.check.rows import RowCut, agree, is_close
from anybatch.losses import function_of
from anybatch.trial import RowPart, distance, limit_of

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
            if max(far.gradient, far.loss) > self.limit:
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


Table = Mapping[Key, Call]  # the calls of some rows
inputs_of: Callable[[Call], list[Tensor]] = attrgetter("inputs")
outputs_of: Callable[[Call], list[Tensor]] = attrgetter("outputs")


def fault_of(
    call: Call,
    tables: Sequence[Table],
    parts: Sequence[RowPart],
    tolerance: float,
    *,
    of: Callable[[Call], list[Tensor]] = outputs_of,
    from_end: bool = False,
) -> str:
    """Return how a call differs from the same call on the parts of its rows, "" if it does not.

    It is "dropped rows", "outputs" (of rows), "unknown" (a call or its shapes do not fit) or "pooled": one
    value for all rows. With `from_end` padding in front is left out, else padding at the end.
    """
    pieces = [of(table[call.key]) for table in tables if call.key in table]
    if len(pieces) < len(parts) or any(len(piece) < len(of(call)) for piece in pieces):
        return "unknown"
    faults: set[str] = set()
    for value, *mine in zip(of(call), *pieces, strict=False):
        is_same = agree(value, list(zip(mine, parts, strict=True)), tolerance, from_end=from_end)
        if not is_same and all(piece.shape == value.shape for piece in mine):
            faults.add("pooled")
        elif is_same is None:
            faults.add("dropped rows" if _is_short(value, mine) else "unknown")
        elif not is_same:
            faults.add("outputs")
    order = ("dropped rows", "outputs", "unknown", "pooled")
    return next((fault for fault in order if fault in faults), "")


def _is_short(whole: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return True if the first axes of the pieces add up to less than the whole's."""
    alike = all(piece.dim() == whole.dim() and piece.shape[1:] == whole.shape[1:] for piece in pieces)
    return alike and whole.dim() > 0 and sum(piece.shape[0] for piece in pieces) < whole.shape[0]


def rows_differ(comparison: Comparison, passes: Sequence[Pass]) -> bool:
    """Return True if the model gives some row other outputs in the worst split than in the whole batch."""
    worst = worst_of(comparison, passes)
    tables = [worst.calls.table(part) for part in worst.cut.parts]
    faults = {fault_of(call, tables, worst.cut.parts, 10 * comparison.limit) for call in comparison.outermost}
    return not faults <= {"", "pooled"}


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
