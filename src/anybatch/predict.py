"""Bytes as a function of the micro-batch: a few traces, then no more runs."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.errors import TraceError
from anybatch.ledger import Ledger
from anybatch.recording import INPUT, Recording, continued
from anybatch.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The bytes of one step at every size of its micro-batches.

    Two traces of one step at different sizes go through the same events. Every storage's size is a line in
    the rows, so the bytes alive after each event are one, and the peak is the highest of these lines: flat
    at first, where the optimizer's temporaries decide, then steeper. It is exact where sizes are lines, and
    the last micro-batch is taken to be as large as the others.

    Attributes:
        low: the trace of the smallest micro-batch.
        high: the trace of the next one.
        exact: whether every further trace agreed to the byte.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anybatch import Step
        >>> from anybatch.batch import TensorBatch
        >>> from anybatch.plan import Plan
        >>> from anybatch.trace import trace
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> head = TensorBatch((torch.zeros(1, 3), torch.zeros(1, 2)))
        >>> def traced(rows):
        ...     return trace(Plan(rows=rows, micro_batch=rows), step._task(), head)
        >>> law = Law.fit([traced(2), traced(3)])
        >>> law.peak(1000) == traced(1000).peak
        True
    """

    low: Trace
    high: Trace
    exact: bool

    @staticmethod
    def fit(traces: Sequence[Trace]) -> "Law":
        """The law of two traces or more.

        Args:
            traces: of one step at different sizes of its micro-batches: all uncut, or all cut, with the same
                number of micro-batches run and no others (`trace(..., micro_batches=3)`, or 4 where sums are
                compensated).

        Raises:
            TraceError: fewer than two sizes, or steps that do not go the same way.
        """
        ordered = sorted({one.plan.micro_batch: one for one in traces}.values(), key=_size)
        if len(ordered) < 2:
            raise TraceError(
                f"Expected traces of at least two sizes of micro-batch, got {len(ordered)}. "
                "Trace the step at another size, too."
            )
        low, high, *others = ordered
        if low.marks[-1].micro_batch >= low.micro_batches and low.continues:
            raise TraceError(
                f"Expected traces of micro-batches that were run, got {low.marks[-1].micro_batch + 1} of "
                f"which {low.micro_batches} were. Trace with micro_batches={low.micro_batches}."
            )
        for one in (high, *others):
            if not _is_aligned(low.recording, one.recording):
                raise TraceError(
                    f"Expected the same step at {_size(low)} and {_size(one)} rows of a micro-batch, got "
                    f"{len(low.recording.storages)} and {len(one.recording.storages)} events. "
                    "Trace it at the very size that is wanted."
                )
        law = Law(low=low, high=high, exact=True)
        return replace(law, exact=all(law._at(_size(one)).peak(low.granule) == one.peak for one in others))

    def peak(self, micro_batch: int, rows: int = 0) -> int:
        """The most bytes alive at once.

        Args:
            micro_batch: rows of each micro-batch.
            rows: rows of the batch, if it is cut; 0 for those of the traces. What a loss counts on the whole
                batch before it is cut is taken to be as large as in the traces.
        """
        return self._recording(micro_batch, rows).peak(self.low.granule)

    def ledger(self, micro_batch: int, rows: int = 0) -> Ledger:
        """Bytes by owner, module and moment; arguments as for `peak`."""
        low = self.low
        recording = self._recording(micro_batch, rows)
        return recording.ledger(source=low.source, device=low.device, granule=low.granule)

    def largest_fitting(self, budget: int, at_most: int, rows: int = 0) -> int:
        """The most rows of a micro-batch whose peak is within a budget.

        Args:
            budget: bytes.
            at_most: rows of a micro-batch.
            rows: rows of the batch, as for `peak`.

        Returns:
            Rows; 0 where even one row does not fit.
        """
        fits, fails = 0, at_most + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self.peak(middle, rows) <= budget else (fits, middle)
        return fits

    def _at(self, micro_batch: int) -> Recording:
        """What a meter would record of as many micro-batches as were run."""
        low, high = self.low.recording, self.high.recording
        step, span = micro_batch - _size(self.low), _size(self.high) - _size(self.low)

        def at(one: "array[int]", other: "array[int]") -> "array[int]":
            pairs = zip(one, other, strict=True)
            return array("q", [a if a == b else max(0, a + (b - a) * step // span) for a, b in pairs])

        return replace(low, before=at(low.before, high.before), after=at(low.after, high.after))

    def _recording(self, micro_batch: int, rows: int) -> Recording:
        """What a meter would record of a batch of so many rows."""
        found = self._at(micro_batch)
        step, span = micro_batch - _size(self.low), _size(self.high) - _size(self.low)
        if self.low.micro_batches == 1:
            return found
        given = self.low.plan.rows + (self.high.plan.rows - self.low.plan.rows) * step // span
        return self._of_rows(found, micro_batch, rows or given, given)

    def _of_rows(self, found: Recording, micro_batch: int, rows: int, given: int) -> Recording:
        """The same with another number of rows there, and with as many micro-batches as that takes."""
        run, wanted = self.low.micro_batches, -(-rows // micro_batch)
        if wanted != run and not self.low.continues:
            raise TraceError(
                f"Expected {run} micro-batches, as many as were traced, got {wanted}. This loss holds "
                "something of every micro-batch: trace it at the very size that is wanted."
            )
        if rows != given:
            from_start = found.storages[: found.marks[1].event]
            inputs = {number for number in from_start if found.owners[number] == INPUT}

            def grown(sizes: "array[int]") -> "array[int]":
                pairs = zip(found.storages, sizes, strict=True)
                return array("q", [size * rows // given if one in inputs else size for one, size in pairs])

            found = replace(found, before=grown(found.before), after=grown(found.after))
        return continued(found, run, wanted) if wanted > run else found


def _size(trace: Trace) -> int:
    return trace.plan.micro_batch


def _is_aligned(one: Recording, other: Recording) -> bool:
    """Whether the same storages begin, change and end in the same order."""
    return one.storages == other.storages and [size > 0 for size in one.after] == [
        size > 0 for size in other.after
    ]
