"""Callbacks: objects that look at steps and trainings; the functions of theirs that a step calls."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import Tensor, nn

from anybatch.core.batch import Micro
from anybatch.core.errors import PlanError
from anybatch.core.oom import mark_final, note_update
from anybatch.core.report import EpochReport, MicroBatchDone, MicroBatchRedone, RunInfo, StepReport


class Callback:
    """Base class of callbacks, which look at steps and trainings: `callbacks=[...]` of a step or a trainer.

    Every method is optional, and what costs something is done only if a callback has the method for it. Any
    object with some of these methods is a callback, without this base class; a plain function is called like
    `update`.

    Gradients are those of the caller's loss, without loss scale. Attempts that are undone are not shown. A
    callback that raises before the update fails the step, and everything is as before; an error after it
    carries a note that the update was made. Memory that runs out in a callback is not recovered from. If
    `update`, `epoch` or `save` raises an Exception in a trainer's callback, the others are still called, a
    checkpoint is saved, and the error is raised.

    Attributes:
        name: name of its records in a log; empty to leave them out.
        is_due: False if the next step need not call `micro_gradients`, which makes that step cheaper.
        on_every_rank: False for a trainer's callback that only prints or writes: then rank 0 alone calls it.

    Example:
        >>> class Norms(Callback):
        ...     def gradients(self, gradients):
        ...         self.norms = {name: float(one.norm()) for name, one in gradients.items()}
    """

    name = ""
    is_due = True
    on_every_rank = True

    # ---- a step

    def attached(self, step: Any) -> None:
        """Handle being made a callback of this step, or of a trainer's; raise PlanError to refuse it."""

    def begin(self, done: int) -> None:
        """Handle the start of micro-batches, first or again: of those shown so far only `done` count."""

    def micro_gradients(self, micro: Micro, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        """Handle what a micro-batch adds to the gradients. It costs memory for its gradients.

        Args:
            micro: the rows.
            gradients: by name of the parameter, in the dtype in which they arrive; several where terms are
                divided one by one.
            scale: the loss scale, and provisional divisors, that they are multiplied by.
        """

    def micro_batch(self, event: MicroBatchDone) -> None:
        """Handle a micro-batch whose gradient is in the sum."""

    def redone(self, event: MicroBatchRedone) -> None:
        """Handle a micro-batch that was undone; its rows run again."""

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Handle the gradients of the batch by name of the parameter: once per update, before clipping."""

    def parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Handle the parameters by name, after the optimizers have stepped."""

    def update(self, report: StepReport) -> None:
        """Handle the end of a step. `report.updated` is False if it changed no parameter."""

    def record(self) -> Mapping[str, Any]:
        """Return the entries of a log for the last update, as JSON can hold them; empty for none."""
        return {}

    # ---- a training

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Handle the start or the resume of a training. `trainer.stop(reason)` ends it after an update."""

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """Handle the end of an epoch and its validation. Its checkpoint is saved after this."""

    def save(self, trainer: Any, path: Any) -> None:
        """Handle a checkpoint that was written to this `Path`; on rank 0."""

    def stop(self, trainer: Any) -> None:
        """Handle the end of a training: it is done, or an exception was raised."""

    def validation(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a context for the validation after each epoch."""
        return nullcontext()

    def metrics(self) -> Mapping[str, Any]:
        """Return metrics of a validation by name, as for `anybatch.Metrics`; read when a trainer is made."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint: nested numbers, strings, lists, dicts and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def __repr__(self) -> str:
        held: dict[str, Any] = {}
        for name, one in inspect.signature(type(self)).parameters.items():
            value = vars(self).get(name, self)
            held |= value if one.kind is one.VAR_KEYWORD and value is not self else {name: value}
        told = [f"{name}={_in_words(value)}" for name, value in held.items() if value is not self]
        return f"{type(self).__name__}({', '.join(told)})"


CallbackLike = Callback | Callable[[StepReport], object]


def _in_words(value: Any) -> str:
    text = repr(value)
    is_plain = len(text) < 60 and "\n" not in text and " at 0x" not in text
    return text if is_plain else getattr(value, "__name__", type(value).__name__)


_NOTHING = {name: one for name, one in vars(Callback).items() if inspect.isfunction(one) and name[0] != "_"}
Functions = tuple[Callable[..., Any], ...]


def bound(callbacks: Iterable[object], name: str) -> Functions:
    """Return this method of the callbacks that have one of their own; a plain function is an `update`."""
    found = [one if name == "update" and _is_function(one) else getattr(one, name, None) for one in callbacks]
    return tuple([f for f in found if callable(f) and getattr(f, "__func__", f) is not _NOTHING[name]])


def check_callbacks(callbacks: object) -> tuple[object, ...]:
    """Return the callbacks as a tuple; raise PlanError if one is none or is given twice."""
    if not isinstance(callbacks, Iterable):
        raise PlanError(f"Expected a list of callbacks, got {callbacks!r}. Write callbacks=[...].")
    found = tuple(callbacks)
    for index, one in enumerate(found):
        if any(one is other for other in found[:index]):
            raise PlanError(
                f"Expected each callback once, got {one!r} twice. It would be called twice: pass it to the "
                "step or to the trainer."
            )
        if fault := _fault(one):
            raise PlanError(f"Expected a callback: an object with methods of ab.Callback, got {fault}")
    return found


def _fault(one: object) -> str:
    if isinstance(one, type):
        return f"the class {one.__name__}. Pass an object: {one.__name__}(...)."
    if _is_function(one):
        told = "which does not take a StepReport alone. A metric belongs in ab.Metrics(name=...)."
        return "" if takes(one, 1) else f"{one!r}, {told}"
    for name, nothing in _NOTHING.items():
        given = [*inspect.signature(nothing).parameters][1:]
        for function in bound([one], name):
            if not takes(function, len(given)):
                return f"{one!r} with another {name}(). Write def {name}({', '.join(['self', *given])})."
    has_any = any(bound([one], name) for name in _NOTHING)
    for name in [name for name in dir(one) if name[0] != "_" and name not in _NOTHING]:
        near = [
            repr(other) for other in get_close_matches(name, _NOTHING, 1, cutoff=0.85 if has_any else 0.6)
        ]
        if name.startswith("on_"):  # the way of other libraries
            near.append(f"by one of {', '.join(_NOTHING)}")
        if near and callable(getattr(one, name, None)):
            return (
                f"{one!r} with a method {name!r}, which is never called. Call it {near[0]}, or begin its "
                "name with an underscore if it is another method."
            )
    return "" if has_any else f"{one!r}, which has none of them. Give it one of {', '.join(_NOTHING)}."


def takes(function: Any, count: int) -> bool:
    """Return True if a function may be called with so many positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # unknown, as of some builtins
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _is_function(one: object) -> bool:
    return inspect.isroutine(one) or isinstance(one, partial)


def call(functions: Functions, *given: Any) -> None:
    """Call functions of callbacks; no step recovers from what they raise."""
    try:
        for function in functions:
            function(*given)
    except BaseException as error:
        mark_final(error)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The functions that a step calls, bound once; none by default."""

    attached: Functions = ()
    begin: Functions = ()
    micro_batch: Functions = ()
    redone: Functions = ()
    gradients: Functions = ()
    parameters: Functions = ()
    update: Functions = ()
    of_micro_gradients: tuple[object, ...] = ()  # the callbacks with this method

    @staticmethod
    def of(callbacks: Sequence[object]) -> "Callbacks":
        """Bind the methods of these callbacks."""
        *names, _ = [one.name for one in fields(Callbacks)]
        shown = tuple([one for one in callbacks if bound([one], "micro_gradients")])
        return Callbacks(**{name: bound(callbacks, name) for name in names}, of_micro_gradients=shown)

    @property
    def are_inside(self) -> bool:
        """True if any callback looks at more than the report of a step."""
        return any((self.micro_batch, self.redone, self.gradients, self.parameters, self.of_micro_gradients))

    def due(self) -> Functions:
        """Return the functions that the gradients of a micro-batch are due to."""
        due = [one for one in self.of_micro_gradients if getattr(one, "is_due", True)]
        return bound(due, "micro_gradients")

    def tell(self, report: StepReport) -> None:
        """Tell the end of a step; an error after the update says that it was made."""
        try:
            call(self.update, report)
        except BaseException as error:
            if report.updated:
                note_update(error, report.update)
            raise
