"""Callbacks of a training: early stopping, averaged weights; the states of all."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.step import Step


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
        sign = 1 if self.larger_is_better else -1
        first = self.best is None and not math.isnan(value)
        if first or (self.best is not None and sign * (value - self.best) > self.least_change):
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


class EMA(TrainerCallback):
    """A callback that averages the weights exponentially over updates (Polyak averaging).

    After the first update the average is the weights, after each later one `decay * average + (1 - decay) *
    weights`, as in `torch.optim.swa_utils`. Only updates count: the number of micro-batches and skipped steps
    do not matter. 16-bit weights are averaged in float32. The average is one more copy of the weights on
    their device, which the budget of a step does not include.

    Args:
        decay: weight of the old average in each update, from 0 to below 1.
        buffers: also average floating-point buffers, such as the statistics of BatchNorm. Otherwise the
            average is used with the model's current buffers.
        validate: run the trainer's validation with the averaged weights.

    Attributes:
        updates: updates in the average so far.
        average: the averaged values by parameter name, empty before the first update.

    Raises:
        PlanError: the decay is out of range.

    Example:
        >>> import torch
        >>> from anybatch import Step, Trainer
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> ema = EMA(decay=0.9)
        >>> trainer = Trainer(
        ...     step, (torch.zeros(8, 2), torch.ones(8, 1)), batch_size=4, progress=False, callbacks=[ema]
        ... )
        >>> reports = trainer.fit(epochs=2)
        >>> with ema.weights(step):
        ...     averaged = model.bias.item()
        >>> ema.updates, averaged < model.bias.item()
        (4, True)
    """

    def __init__(self, decay: float = 0.999, *, buffers: bool = False, validate: bool = True) -> None:
        if not 0 <= decay < 1:
            raise core.PlanError(
                f"Expected decay from 0 to below 1, got {decay}. Use 0.99 to average over about 100 updates."
            )
        self.decay, self.buffers, self.validate = decay, buffers, validate
        self.updates = 0
        self.average: dict[str, Tensor] = {}
        self._mix: Callable[..., None] = get_ema_multi_avg_fn(decay)

    def start(self, trainer: Any, info: core.RunInfo) -> None:
        """Keep the trainer; raise PlanError for a sharded model, of which no checkpoint has an average."""
        if trainer.step.strategy.is_lockstep:
            raise core.PlanError(
                f"Expected a model that is not sharded to average its weights, got a "
                f"{type(trainer.step.model).__name__} with fully_shard. Leave ab.EMA out."
            )
        super().start(trainer, info)

    def update(self, report: core.StepReport) -> None:
        """Add the weights to the average if the step made an update."""
        if report.updated:
            self._add(self._trainer.step)

    @torch.no_grad()
    def _add(self, step: Step) -> None:
        places, averaged, current = self._places(step), list[Tensor](), list[Tensor]()
        for name, (*_, value) in places.items():
            if name not in self.average:
                dtype = torch.float32 if value.dtype in core.SHORT_DTYPES else value.dtype
                self.average[name] = value.detach().to(dtype, copy=True)
                continue
            average = self.average[name] = self.average[name].to(value.device)  # on the host after a resume
            averaged.append(average)
            current.append(value.detach().to(average.dtype))
        if averaged:
            self._mix(averaged, current, self.updates)
        self.updates += 1

    def _places(self, step: Step) -> dict[str, list[Tensor]]:
        """Return the tensors that hold each averaged value, the most precise last."""
        places: dict[str, list[Tensor]] = {}
        for name, parameter in step.model.named_parameters():
            full = step.masters.of(parameter)
            places[private.plain_name(name)] = [parameter] if full is None else [parameter, full]
        if self.buffers:
            places |= {private.plain_name(name): [buffer] for name, buffer in step.model.named_buffers()}
        return {name: place for name, place in places.items() if place[0].is_floating_point()}

    @contextmanager
    def weights(self, step: Step) -> Generator[None]:
        """Put the averaged weights into a step's model inside this context, and its own back afterwards.

        Before the first update nothing changes. Do not train inside.

        Args:
            step: the step whose model gets the weights; afterwards they are bit-identical to before.
        """
        places = self._places(step)
        pairs = [(one, self.average[name]) for name in places.keys() & self.average for one in places[name]]
        with torch.no_grad():
            before = [one.clone() for one, _ in pairs]
        try:
            _write((one, average) for one, average in pairs)
            yield
        finally:
            _write((one, own) for (one, _), own in zip(pairs, before, strict=True))

    def validation(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a context with the averaged weights, or an empty one if `validate` is False."""
        return self.weights(trainer.step) if self.validate else nullcontext()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the average and the number of updates in it."""
        return {"updates": self.updates, "average": dict(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the average and the number of updates in it."""
        self.updates = state["updates"]
        self.average = {name: value.clone() for name, value in state["average"].items()}


@torch.no_grad()
def _write(pairs: Any) -> None:
    for place, value in pairs:
        place.copy_(value)


def records(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what callbacks recorded of the last update, by their names; for logs."""
    named = [one for one in (*trainer.step.callbacks, *trainer.callbacks) if getattr(one, "name", "")]
    return {one.name: dict(one.record()) for one in named if hasattr(one, "record")}


def states(ones: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return class name and state of the objects that have a state."""
    found = [(type(one).__name__, dict(one.state_dict())) for one in ones if hasattr(one, "state_dict")]
    return [(name, state) for name, state in found if state]


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
