"""Events and reports of a step, as frozen records."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anybatch.core.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchDone:
    """Event: a micro-batch is done, and its gradient is in the sum."""

    index: int  # 0 for the first micro-batch of the step
    rows: int  # rows of this micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRedone:
    """Event: a micro-batch was undone (out of memory, or gradient overflow); its rows run again."""

    index: int  # number of micro-batches of the step that were done before it
    rows: int  # rows of this micro-batch
    reason: str  # the allocator's message, or the loss scale at which the gradient overflowed


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepReport:
    """The result of one logical step.

    Comparisons leave out `counts`, `update`, `learning_rate`, `seconds` and `unchecked`.

    Attributes:
        loss: the loss of the whole batch before the update; NaN if all weights are 0.
        terms: the value of each named term, without its coefficient; `{"loss": ...}` for a single loss.
        weights: the divisor of each term (rows, valid tokens, sum of class weights).
        rows: rows of the batch.
        micro_batches: number of micro-batches.
        grad_norm: 2-norm of the whole gradient before clipping; NaN if no update was made.
        updated: False if every weight was 0 (a fully masked batch, or all rows left out), or if the update
            was skipped: then parameters, optimizer and scheduler are unchanged.
        cut: rows of each micro-batch, as carried out.
        redone: number of micro-batches that were undone and done again, because memory ran out or their
            gradient overflowed.
        too_large: rows of the smallest micro-batch in which memory ran out and that can be cut further; 0 if
            there was none.
        dropped: rows of micro-batches that were left out, because they were not finite.
        scale: the loss scale after the step.
        counts: events of parameter servers in this step: pushes and their staleness, units repeated, workers
            and servers replaced.
        update: number of updates of this `Step` so far, this one included.
        learning_rate: learning rate of the first parameter group of the first optimizer, in this update.
        seconds: wall time of the step; for a window, the time of its `add` calls and of the update.
        unchecked: why a few rows could not show that the split does not matter; empty if they did, or nothing
            was split. `checked` is True if it is empty.
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
