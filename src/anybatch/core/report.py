"""Events and reports of steps and trainings, as frozen records."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from anybatch.core.units import format_count, format_seconds


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

    Comparisons leave out `counts`, `update`, `learning_rate`, `held`, `seconds`, `compared` and
    `unchecked`.

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
        counts: events of parameter servers in this step: pushes and their bytes, units repeated, workers
            and servers replaced.
        update: number of updates of this `Step` so far, this one included.
        learning_rate: learning rate of the first parameter group of the first optimizer, in this update.
        held: True if the gradients of a sharded model stayed unsharded until the last micro-batch.
        seconds: wall time of the step; for a window, the time of its `add` calls and of the update.
        compared: the last split update of this step at which the loss was that of larger parts; 0 for none.
        unchecked: why a few rows could not show that the split does not matter; empty if they did, or nothing
            was split. `checked` is True if it is empty.

    Example:
        >>> import anybatch as ab, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> step = ab.Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters()), micro_batch=4)
        >>> report = step((torch.randn(10, 3), torch.randn(10, 1)))
        >>> report.cut, report.weights, report.checked
        ((4, 4, 2), {'loss': 10.0}, True)
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
    held: bool = field(default=False, compare=False)
    seconds: float = field(default=0.0, compare=False)
    compared: int = field(default=0, compare=False)
    unchecked: str = field(default="", compare=False)

    @property
    def checked(self) -> bool:
        """True if nothing was split, or a few rows gave the same loss and gradient in several splits."""
        return not self.unchecked

    def asdict(self) -> dict[str, Any]:
        """Return all values by name, also `checked`, for a log."""
        return asdict(self) | {"checked": self.checked}

    def __repr__(self) -> str:
        made = f"update {self.update}" if self.updated else "no update"
        told = [f"loss {self.loss:.6g}", f"rows {self.rows}", f"micro_batches {self.micro_batches}"]
        values = {"grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        told += [f"{name} {value:.4g}" for name, value in values.items() if not math.isnan(value)]
        rare = {"redone": (self.redone, 0), "dropped": (self.dropped, 0), "scale": (self.scale, 1.0)}
        told += [f"{name} {value:g}" for name, (value, usual) in rare.items() if value != usual]
        return f"StepReport({', '.join([made, *told, format_seconds(self.seconds)])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The size of a training when it starts or resumes."""

    epochs: int  # number of the last epoch
    done_epochs: int  # epochs finished before this start
    done_updates: int  # updates made before this start
    total_updates: int | None  # updates after all epochs; None if unknown
    rows: int | None  # rows of an epoch; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """The result of one epoch."""

    epoch: int  # 1 for the first
    updates: int  # updates since the start of the run
    loss: float  # mean over all rows of the epoch, each at the weights before its update
    validation: Mapping[str, float]  # loss, terms and metrics; empty without validation rows
    learning_rate: float  # learning rate of the first parameter group after the epoch
    seconds: float  # wall time of this epoch's training, without validation
    samples_per_second: float  # trained rows per second
    dropped: int = 0  # rows that were left out, because they were not finite
    skipped: int = 0  # steps without an update: all rows masked or left out, or the update skipped

    def __str__(self) -> str:
        held_out = "".join(f"  validation {name} {value:.4f}" for name, value in self.validation.items())
        lost = f"  {format_count(self.dropped)} rows left out" if self.dropped else ""
        lost += f"  {format_count(self.skipped)} steps without update" if self.skipped else ""
        return (
            f"epoch {self.epoch:3}  loss {self.loss:.4f}{held_out}  lr {self.learning_rate:.3g}  "
            f"{format_count(self.samples_per_second)} samples/s  {format_seconds(self.seconds)}{lost}"
        )
