"""What a step reports, as frozen records."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anybatch.core.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchDone:
    """One micro-batch went forward and backward; its gradient is in the sum."""

    index: int  # 0 for the first micro-batch of the step
    rows: int  # rows of this micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRedone:
    """A micro-batch was undone, and its rows come again: memory ran out, or its gradient overflowed."""

    index: int  # how many micro-batches of the step were done before it
    rows: int  # rows it had
    reason: str  # what the allocator said, or at which loss scale it overflowed


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepReport:
    """One logical step is over.

    In a comparison `update`, `learning_rate` and `seconds` are left out.

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
        counts: of parameter servers, what happened in the step: pushes and their staleness, units repeated,
            workers and servers replaced. Left out in a comparison, too.
        update: how many updates this `Step` has made so far, this one included.
        learning_rate: of the first optimizer's first group of parameters, in this update.
        seconds: wall time of the step; of a window, that of its calls of `add` and of the update.
        unchecked: why a few rows could not show that the split does not matter; empty if they did, or nothing
            was split. `checked` is True where it is empty.
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
    counts: Mapping[str, int] = field(default_factory=dict[str, int], compare=False)
    update: int = field(default=0, compare=False)
    learning_rate: float = field(default=math.nan, compare=False)
    seconds: float = field(default=0.0, compare=False)
    unchecked: str = field(default="", compare=False)

    @property
    def checked(self) -> bool:
        """True if nothing was split, or a few rows gave the same loss and gradient in several splits."""
        return not self.unchecked

    def __repr__(self) -> str:
        made = f"update {self.update}" if self.updated else "no update"
        told = [f"loss {self.loss:.6g}", f"rows {self.rows}", f"micro_batches {self.micro_batches}"]
        values = {"grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        told += [f"{name} {value:.4g}" for name, value in values.items() if not math.isnan(value)]
        rare = {"redone": (self.redone, 0), "dropped": (self.dropped, 0), "scale": (self.scale, 1.0)}
        told += [f"{name} {value:g}" for name, (value, usual) in rare.items() if value != usual]
        return f"StepReport({', '.join([made, *told, format_seconds(self.seconds)])})"


Event = MicroBatchDone | MicroBatchRedone | StepReport
Listener = Callable[[Event], None]
