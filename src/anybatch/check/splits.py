"""Splits compared with the whole batch: errors, the model's outputs row by row, and its state"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from anybatch.batchnorm import listed
from anybatch.check.bench import CheckBench
from anybatch.check.finding import Finding, finding
from anybatch.check.passes import Call, Pass, Table
from anybatch.check.rows import Rows, is_close
from anybatch.core import Batch, BatchError
from anybatch.losses import function_of
from anybatch.trial import Axis, RowPart, distance, find_axis, limit_of, take

# A smaller gradient may be rounding of numbers that cancel inside the model, as in a perfect fit.
_TINY = 1e-6
# How a call may differ, the surest first. "pooled" is one value for all rows: a parent may weigh it rightly.
_FAULTS = ("dropped rows", "outputs", "unknown", "pooled", "")


def cut_sizes_to_try(rows: int, micro_batch: int | None) -> list[int]:
    """Return sizes of micro-batches: the caller's, two that leave a smaller last one, and 1."""
    ragged = [size for size in range(2, rows) if rows % size]
    near = [min(ragged, key=lambda size: abs(size - share * rows)) for share in (3 / 8, 5 / 8) if ragged]
    return [size for size in dict.fromkeys((micro_batch or rows, *near, 1)) if size < rows]


class Pieces(NamedTuple):
    """The calls of modules on parts of the rows, to be compared with those on all rows."""

    tables: Sequence[Table]
    parts: Sequence[RowPart]
    tolerance: float  # relative error that counts as rounding
    from_end: bool = False  # leave out padding in front, else padding at the end

    def fault(self, call: Call, of: str = "outputs") -> str:
        """Return how the tensors of a call on all rows differ from those on the parts, as in `_FAULTS`."""
        if not all(call.key in table for table in self.tables):
            return "unknown"
        calls = [call, *[table[call.key] for table in self.tables]]
        faults = [self._fault(*values) for values in zip(*[getattr(one, of) for one in calls], strict=False)]
        return min(faults, key=_FAULTS.index, default="")

    def _fault(self, whole: Tensor, *pieces: Tensor) -> str:
        pairs = list(zip(pieces, self.parts, strict=True))
        values = [take(whole, piece.shape, part, from_end=self.from_end) for piece, part in pairs]
        if all(b is not None and is_close(a, b, self.tolerance) for a, b in zip(pieces, values, strict=True)):
            return ""
        if all(piece.shape == whole.shape for piece in pieces):
            return "pooled"
        if all(value is not None for value in values):
            return "outputs"
        is_alike = {(one.dim(), one.shape[1:]) for one in pieces} == {(whole.dim(), whole.shape[1:])}
        return "dropped rows" if is_alike and sum(map(len, pieces)) < len(whole) else "unknown"

    def first(self, calls: Table) -> tuple[Call, str] | None:
        """Return the first call with the same inputs and other outputs in the parts, and its fault."""
        same = [call for call in calls.values() if not self.fault(call, "inputs")]
        found = [(call, fault) for call in same if (fault := self.fault(call)) not in ("", "unknown")]
        return min(found, key=lambda one: one[1] == "pooled", default=None)

    def axes(self, call: Call, of: str) -> list[Axis | None]:
        """Return the axis of the rows in each tensor of a call."""
        pairs = zip(getattr(call, of), getattr(self.tables[0][call.key], of), strict=False)
        return [find_axis(whole.shape, piece.shape, self.parts[0]) for whole, piece in pairs]


class Comparison:
    """Passes in several splits, compared with a reference: the pass over all rows uncut.

    Attributes:
        limit: the largest relative error that counts as rounding.
        samples: the rows before `collate`; None without one, or if they are not collated once.
        passes: the splits.
        notes: remarks for the report.
    """

    def __init__(
        self, bench: CheckBench, whole: Rows, samples: Batch | None, notes: list[str], micro_batch: int | None
    ) -> None:
        self.bench, self.whole, self.samples, self.notes = bench, whole, samples, notes
        self.reference = reference = Pass(bench, whole)
        if reference.failure is not None:
            raise reference.failure
        rows = range(whole.batch.rows)
        if not reference.is_weighed:
            raise BatchError(
                f"Expected rows that count, got {len(rows)} whose weight is 0 (all of them are masked). "
                "Hand over a batch with valid targets."
            )
        self.limit = limit_of(reference.dtypes, len(rows))
        self.splits = [whole.cut(size) for size in cut_sizes_to_try(len(rows), micro_batch)]
        if reference.unreplayed:
            # Numbers drawn by position may be right by chance while rows come in order.
            self.splits.append(whole.only(rows[::-1]).cut(1))
        passes = [self.compare(self.splits[0], reference)]
        for cut in () if reference.bare else self.splits[1:]:  # a bare mean is never exact
            found = bench.in_time(partial(self.compare, cut, reference))
            passes += [found] if found else []
        several = [one for one in passes if one.cut.micro_batch > 1 or one.failure is None]
        # A model may refuse single rows (BatchNorm does): no fault if other splits run.
        self.passes = several or passes

    def compare(self, cut: Rows, reference: Pass) -> Pass:
        """Compare any split with any reference."""
        found = Pass(self.bench, cut)
        if found.failure is None:
            far = distance(reference, found)
            if max(far.gradient, far.loss) > self.limit:
                far = distance(reference, found, *self._halves)
            found.error, found.loss_error = far.gradient, far.loss
            found.is_same = max(far.gradient, far.loss) <= self.limit
            if found.is_same and not reference.bare:
                found.tables = {}  # no longer needed, and large
        return found

    @property
    def name(self) -> str:
        """The name of the loss."""
        held: Any = function_of(self.bench.loss)
        held = getattr(held, "func", held)  # of a partial
        return getattr(held, "__qualname__", type(held).__qualname__).rpartition("<locals>.")[2]

    @cached_property
    def doubt(self) -> str:
        """A remark if the gradients of all rows and of both halves are next to nothing; else empty."""
        tiny, size = min(self.limit, _TINY), self.reference.size
        is_tiny = size < tiny and all(half.size < tiny for half in self._halves)
        return f"the gradient of these rows is so small (norm {size:.1g}) that it may be rounding" * is_tiny

    @cached_property
    def _halves(self) -> list[Pass]:
        rows = range(self.whole.batch.rows)
        middle = len(rows) // 2
        halves = [Pass(self.bench, self.whole.only(half)) for half in (rows[:middle], rows[middle:])]
        return [half for half in halves if half.failure is None and half.is_weighed]

    @cached_property
    def worst(self) -> Pass:
        """The first split that differs, if possible one that did not fail."""
        return min(self.passes, key=lambda one: (one.is_same, one.failure is not None))

    @property
    def differs(self) -> bool:
        """True if some split has another gradient or loss than the whole batch."""
        return not self.worst.is_same

    @cached_property
    def calls(self) -> Table:
        """The calls of the model on all rows."""
        return self.reference.tables[self.whole.part]

    @cached_property
    def pieces(self) -> Pieces:
        """The calls of the model in the worst split."""
        parts = self.worst.cut.parts
        # Outputs average over fewer numbers than gradients.
        return Pieces([self.worst.tables.get(part, {}) for part in parts], parts, 10 * self.limit)

    @cached_property
    def rows_differ(self) -> bool:
        """True if the model gives some row other outputs in the worst split than in the whole batch."""
        faults = {self.pieces.fault(call) for call in self.calls.values() if call.is_outermost}
        return not faults <= {"", "pooled"}

    @property
    def may_be_dropout(self) -> bool:
        """True if rows may differ only because dropout draws for them in another order."""
        draws = self.bench.draws
        is_open = draws.has_packed or (draws.has_dropout and self.rows_differ)
        return self.differs and is_open and not self.reference.unreplayed


def find_state(compared: Comparison) -> list[Finding]:
    """Return a finding for each module whose saved buffers depend on the split."""
    saved = dict[str, list[str]]()
    for key, value in compared.reference.state.items():
        others = [one.state[key] for one in compared.passes if key in one.state]
        if not all(is_close(one, value, 10 * compared.limit) for one in others):
            saved.setdefault(key[0], []).append(f"`{key[1]}`")
    what = "A split batch leaves other values than the whole, by the number of micro-batches: {}."
    return [finding("buffer", culprit, what.format(listed(names))) for culprit, names in saved.items()]
