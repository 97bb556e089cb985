"""What a step reports, as frozen records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchDone:
    """One micro-batch went forward and backward; its gradient is in the sum.

    Attributes:
        index: 0 for the first micro-batch of the step.
        rows: rows of this micro-batch.
    """

    index: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRedone:
    """A micro-batch was undone, and its rows are to come again: memory ran out, or its gradient overflowed.

    Attributes:
        index: how many micro-batches of the step were done before it.
        rows: rows it had.
        reason: what the allocator said, or at which loss scale it overflowed.
    """

    index: int
    rows: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One logical step is over.

    Attributes:
        loss: the loss of the whole batch before the update; NaN where no row had weight.
        terms: the value of each named term, without its coefficient; `{"loss": ...}` for a single loss.
        weights: what each term was divided by (rows, valid tokens, sum of class weights).
        rows: rows of the batch.
        micro_batches: number of micro-batches it was cut into.
        grad_norm: 2-norm of the whole gradient before clipping; NaN where no update was made.
        updated: False where every weight was 0 (a fully masked batch, or all of it left out), or where the
            update was skipped: then parameters, optimizer and scheduler are as they were.
        cut: rows of each micro-batch, as carried out.
        redone: how many micro-batches were undone and done again, because memory ran out in them or their
            gradient overflowed.
        too_large: rows of the smallest in which memory ran out that may be cut further; 0 where there was
            none.
        dropped: rows of micro-batches that were left out, because they were not finite.
        scale: the loss scale after the step.
    """

    loss: float
    terms: Mapping[str, float]
    weights: Mapping[str, float]
    rows: int
    micro_batches: int
    grad_norm: float
    updated: bool
    cut: tuple[int, ...] = ()
    redone: int = 0
    too_large: int = 0
    dropped: int = 0
    scale: float = 1.0


Event = MicroBatchDone | MicroBatchRedone | StepReport
Listener = Callable[[Event], None]
