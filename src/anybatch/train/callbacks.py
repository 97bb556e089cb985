"""Callbacks: told of every start, update and epoch; early stopping, averaged weights, lines for people."""

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from anybatch.core import SHORT_DTYPES, PlanError, StepReport, check_whole, format_count, format_seconds
from anybatch.core import torch_private as private
from anybatch.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is to be done when training starts or goes on."""

    epochs: int  # the last epoch's number
    done_epochs: int  # epochs finished already, before this start
    done_updates: int  # updates made already, before this start
    total_updates: int | None  # updates when all epochs are done; None where nobody knows
    rows: int | None  # rows of an epoch; None where nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One epoch is over."""

    epoch: int  # 1 for the first
    updates: int  # since the very start
    loss: float  # mean over all rows of the epoch, each at the weights its batch met
    validation: Mapping[str, float]  # loss, terms and metrics; empty where there are no validation rows
    learning_rate: float  # of the first parameter group after the epoch
    seconds: float  # wall time of this epoch's training, without validation
    samples_per_second: float  # rows trained per second of it
    dropped: int = 0  # rows that were left out, because they were not finite
    skipped: int = 0  # steps without an update: fully masked, left out as a whole, or skipped

    def __str__(self) -> str:
        held_out = "".join(f"  validation {name} {value:.4f}" for name, value in self.validation.items())
        lost = f"  {format_count(self.dropped)} rows left out" if self.dropped else ""
        lost += f"  {format_count(self.skipped)} steps without update" if self.skipped else ""
        return (
            f"epoch {self.epoch:3}  loss {self.loss:.4f}{held_out}  lr {self.learning_rate:.3g}  "
            f"{format_count(self.samples_per_second)} samples/s  {format_seconds(self.seconds)}{lost}"
        )


class Callback:
    """Is told of the events of a training. This one does nothing: subclasses override what they need.

    The trainer is passed to each method. `trainer.stop(reason)` ends the training after the update or epoch.
    If a callback raises an Exception, the other ones are still told, a checkpoint is saved, and the error
    goes on.

    With several ranks each has its callbacks, and all are told the same. Set `on_every_rank = False` in a
    class that only shows or writes: it is then told on rank 0 only.

    Example:
        >>> class Losses(Callback):
        ...     def __init__(self):
        ...         self.losses = []
        ...     def update(self, trainer, report):
        ...         self.losses.append(report.loss)
        ...     def state_dict(self):
        ...         return {"losses": self.losses}
        ...     def load_state_dict(self, state):
        ...         self.losses = list(state["losses"])
    """

    on_every_rank = True

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Training starts or goes on."""

    def update(self, trainer: Any, report: StepReport) -> None:
        """A step was made. `report.updated` is False if it changed no parameter."""

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """An epoch is over and validated. Its checkpoint is saved after this."""

    def stop(self, trainer: Any) -> None:
        """Training stops: done, or by an exception."""

    def validation(self, trainer: Any) -> AbstractContextManager[None]:
        """A context in which the validation after each epoch runs."""
        return nullcontext()

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps: nested numbers, strings, lists, dicts and tensors; empty for nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""


class EarlyStopping(Callback):
    """Stops a training whose validation has not become better for some epochs.

    Args:
        by: name of the validation value.
        patience: epochs without a better value after which to stop, at least 1.
        least_change: a value is better if it differs by more than this from the best one.
        larger_is_better: whether larger values are better.

    Attributes:
        best: the best value so far; None before there is one. NaN never is.
        waited: epochs since then.

    Raises:
        PlanError: an argument is out of range; at the start, the trainer has no validation; after the first
            epoch, the validation has no value of this name.

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
        check_whole("patience", patience, least=1)
        if not 0 <= least_change < math.inf:
            raise PlanError(
                f"Expected least_change to be a number of at least 0, got {least_change}. Pass the size of a "
                "change, and say by larger_is_better which way is better."
            )
        self.by, self.patience, self.least_change = by, patience, least_change
        self.larger_is_better = larger_is_better
        self.best: float | None = None
        self.waited = 0

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Refuse a trainer without validation; stop again where an earlier run was stopped."""
        if trainer.validation is None:
            raise PlanError(
                f"Expected a trainer with validation rows for early stopping by {self.by!r}, got none. Pass "
                "validation= to the trainer."
            )
        self._stop(trainer)

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """Compare with the best value so far."""
        if self.by not in report.validation:
            raise PlanError(
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
        """The best value, and how long ago it was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.waited = state["best"], state["waited"]


class EMA(Callback):
    """Averages the weights exponentially over updates (Polyak averaging).

    After the first update the average is the weights, after each later one `decay * average + (1 - decay) *
    weights`, as in `torch.optim.swa_utils`. Only updates count: the number of micro-batches does not
    matter, and neither does a step that was skipped. Short weights are averaged in float32. It takes one more
    copy of the weights on their device, which the budget of a step does not include.

    Args:
        decay: share of the average that stays in each update, from 0 to below 1.
        buffers: average floating-point buffers, too, such as the statistics of BatchNorm. Otherwise the
            average is used with the model's own buffers.
        validate: run the trainer's validation with the averaged weights.

    Attributes:
        updates: updates averaged so far.
        average: the averaged values by name of the parameter, empty before the first update.

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
            raise PlanError(
                f"Expected decay from 0 to below 1, got {decay}. Use 0.99 to average over about 100 updates."
            )
        self.decay, self.buffers, self.validate = decay, buffers, validate
        self.updates = 0
        self.average: dict[str, Tensor] = {}
        self._mix: Callable[..., None] = get_ema_multi_avg_fn(decay)

    def update(self, trainer: Any, report: StepReport) -> None:
        """Add the weights of an update that was made."""
        if report.updated:
            self._add(trainer.step)

    @torch.no_grad()
    def _add(self, step: Step) -> None:
        places, averaged, current = self._places(step), list[Tensor](), list[Tensor]()
        for name, (*_, value) in places.items():
            if name not in self.average:
                dtype = torch.float32 if value.dtype in SHORT_DTYPES else value.dtype
                self.average[name] = value.detach().to(dtype, copy=True)
                continue
            average = self.average[name] = self.average[name].to(value.device)  # from the host, if resumed
            averaged.append(average)
            current.append(value.detach().to(average.dtype))
        if averaged:
            self._mix(averaged, current, self.updates)
        self.updates += 1

    def _places(self, step: Step) -> dict[str, list[Tensor]]:
        """Where each averaged value is, the most precise place last."""
        places: dict[str, list[Tensor]] = {}
        for name, parameter in step.model.named_parameters():
            full = step.masters.of(parameter)
            places[private.plain_name(name)] = [parameter] if full is None else [parameter, full]
        if self.buffers:
            places |= {private.plain_name(name): [buffer] for name, buffer in step.model.named_buffers()}
        return {name: place for name, place in places.items() if place[0].is_floating_point()}

    @contextmanager
    def weights(self, step: Step) -> Generator[None]:
        """Let the model of a step have the averaged weights; afterwards it has its own, to the bit.

        Before the first update these are the same. Do not train inside.
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
        """The averaged weights, if asked for."""
        return self.weights(trainer.step) if self.validate else nullcontext()

    def state_dict(self) -> Mapping[str, Any]:
        """The average, and the number of updates in it."""
        return {"updates": self.updates, "average": dict(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on averaging."""
        self.updates = state["updates"]
        self.average = {name: value.clone() for name, value in state["average"].items()}


@torch.no_grad()
def _write(pairs: Any) -> None:
    for place, value in pairs:
        place.copy_(value)


class LossMonitor(Callback):
    """Prints the loss, time per update and rows per second of every n-th update on standard error.

    Args:
        every: updates from one line to the next, at least 1; times are those of all since the last line.

    Raises:
        PlanError: `every` is out of range.
    """

    on_every_rank = False

    def __init__(self, every: int = 1) -> None:
        check_whole("every", every, least=1)
        self.every = every

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Begin to measure."""
        self._began, self._updates, self._rows = time.perf_counter(), 0, 0

    def update(self, trainer: Any, report: StepReport) -> None:
        """Measure; print a line, if it is time for one."""
        self._updates += 1
        self._rows += report.rows
        if trainer.steps % self.every == 0:
            seconds = time.perf_counter() - self._began
            sys.stderr.write(
                f"epoch {trainer.epoch + 1}  step {trainer.steps}  loss {report.loss:.6g}  "
                f"{1000 * seconds / self._updates:.3g} ms an update  "
                f"{format_count(self._rows / seconds)} rows/s\n"
            )
            self._began, self._updates, self._rows = time.perf_counter(), 0, 0


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse what is no callback (PlanError)."""
    for one in callbacks:
        if not isinstance(one, Callback):
            name = one.__name__ if isinstance(one, type) else type(one).__name__
            raise PlanError(
                f"Expected callbacks that are objects of a subclass of ab.Callback, got {name}. Derive its "
                "class from ab.Callback, and pass an object of it."
            )


def states(ones: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """The class and state of those that have one."""
    found = [(type(one).__name__, dict(one.state_dict())) for one in ones if hasattr(one, "state_dict")]
    return [(name, state) for name, state in found if state]


def load_states(path: Path, ones: Sequence[Any], saved: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Give each its state: the n-th of a class that of the n-th of this class."""
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
            warnings.warn(f"{path}: of the run's callbacks and observers, these {what}: {told}", stacklevel=3)
