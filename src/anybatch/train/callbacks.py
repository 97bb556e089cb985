"""Callbacks of a training: early stopping; the states of all."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anybatch import core


class TrainerCallback(core.Callback):
    """A callback that does nothing without a trainer; a step alone refuses it, before anything runs."""

    _trainer: Any = None

    def begin(self, done: int) -> None:
        """Raise PlanError without a trainer."""
        if self._trainer is None:
            raise core.PlanError(
                f"Expected {self!r} in a training, got a step alone. Train by ab.Trainer.fit()."
            )

    def start(self, trainer: Any, info: core.RunInfo) -> None:
        """Keep the trainer."""
        self._trainer = trainer

    def stop(self, trainer: Any) -> None:
        """Drop the trainer."""
        self._trainer = None


class EarlyStopping(TrainerCallback):
    """A callback that stops a training when validation has not improved for some epochs.

    Args:
        by: name of the validation value.
        patience: epochs without a better value before the stop, at least 1.
        least_change: least difference from the best value that counts as better.
        larger_is_better: True if larger values are better.

    Attributes:
        best: the best value so far; None before the first. NaN never counts.
        waited: epochs since the best value.

    Raises:
        PlanError: an argument is out of range; at the start: the trainer has no validation; after the first
            epoch: the validation has no value of this name.

    Example:
        >>> import torch
        >>> from anybatch import Step, Trainer
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0))
        >>> rows = (torch.zeros(4, 2), torch.ones(4, 1))
        >>> stopping = EarlyStopping(patience=2)
        >>> trainer = Trainer(step, rows, rows, batch_size=4, progress=False, callbacks=[stopping])
        >>> len(trainer.fit(epochs=100)), trainer.stopped
        (3, 'validation loss has not become better for 2 epochs')
    """

    def __init__(
        self,
        by: str = "loss",
        *,
        patience: int = 5,
        least_change: float = 0.0,
        larger_is_better: bool = False,
    ) -> None:
        core.check_whole("patience", patience, least=1)
        if not 0 <= least_change < math.inf:
            raise core.PlanError(
                f"Expected least_change to be a number of at least 0, got {least_change}. Pass the size of a "
                "change, and say by larger_is_better which way is better."
            )
        self.by, self.patience, self.least_change = by, patience, least_change
        self.larger_is_better = larger_is_better
        self.best: float | None = None
        self.waited = 0

    def start(self, trainer: Any, info: core.RunInfo) -> None:
        """Raise PlanError without validation; stop at once if an earlier run was stopped."""
        if trainer.validation is None:
            raise core.PlanError(
                f"Expected a trainer with validation rows for early stopping by {self.by!r}, got none. Pass "
                "validation= to the trainer."
            )
        super().start(trainer, info)
        self._stop(trainer)

    def epoch(self, trainer: Any, report: core.EpochReport) -> None:
        """Compare with the best value so far."""
        if self.by not in report.validation:
            raise core.PlanError(
                f"Expected early stopping by a validation value, got {self.by!r}. Choose from "
                f"{sorted(report.validation)}."
            )
        value = report.validation[self.by]
        if is_better(value, self.best, self.least_change, larger=self.larger_is_better):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
            self._stop(trainer)

    def _stop(self, trainer: Any) -> None:
        if self.waited >= self.patience:
            trainer.stop(f"validation {self.by} has not become better for {self.waited} epochs")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best value and the epochs since then."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value and the epochs since then."""
        self.best, self.waited = state["best"], state["waited"]


def is_better(value: float, best: float | None, least_change: float = 0.0, *, larger: bool) -> bool:
    """Return True if a value is the first or better than the best so far; NaN never is."""
    if best is None:
        return not math.isnan(value)
    return (value - best if larger else best - value) > least_change


def records(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what callbacks recorded of the last update, by their names; for logs."""
    named = [one for one in (*trainer.step.callbacks, *trainer.callbacks) if getattr(one, "name", "")]
    return {one.name: dict(one.record()) for one in named if hasattr(one, "record")}


def states(ones: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return class name and state of the objects that have a state."""
    return [
        (type(one).__name__, dict(state))
        for one in ones
        if hasattr(one, "state_dict") and (state := one.state_dict())
    ]


def load_states(path: Path, ones: Sequence[Any], saved: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Load saved states: the n-th object of a class gets the n-th state of that class."""
    left = list(saved)
    new: list[str] = []
    for one in ones:
        name = type(one).__name__
        place = next((index for index, (other, _) in enumerate(left) if other == name), None)
        if place is not None:
            one.load_state_dict(left.pop(place)[1])
        elif hasattr(one, "state_dict") and one.state_dict():
            new.append(name)
    for what, names in {"begin anew": new, "are gone": [name for name, _ in left]}.items():
        if names:
            told = ", ".join(f"{name} ({count})" for name, count in Counter(names).items())
            warnings.warn(f"{path}: of the run's callbacks, these {what}: {told}", stacklevel=3)
