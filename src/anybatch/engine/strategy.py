"""Strategy: how the sums of several processes become one; `Single` is one process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from anybatch.core import Number, StepReport
from anybatch.engine.gradients import Gradient
from anybatch.engine.update import norm_of


class Agreed(NamedTuple):
    """The totals of all processes together."""

    totals: Mapping[str, float]  # the summed loss of each term
    rows: int
    dropped: int


class Strategy(Protocol):
    """The work of several processes on one batch. All call each method in one order.

    Attributes:
        is_many: other processes hold rows of the same batch.
        takes_windows: callers may bring micro-batches one by one.
        is_lockstep: each micro-batch holds collectives, so all processes run equally many, and none may run
            one again alone.
        is_held: gradients are added up over processes after the last micro-batch of this step only.
    """

    is_many: bool
    takes_windows: bool
    is_lockstep: bool
    is_held: bool

    def ready(self, model: nn.Module) -> None:
        """Bring the parameters of a model into the form between steps, before the parts are gathered."""
        ...

    def begin(self, task: Any, settings: Any) -> None:
        """Begin a step or a window of a `Task`, with a `Plan` without rows; refuse what cannot be done."""
        ...

    def carry_out(
        self, task: Any, batch: Any, settings: Any, remote: Callable[[str], Any]
    ) -> StepReport | None:
        """Make a whole step elsewhere, and return its report; None to run it here.

        Args:
            task: the `Task`.
            batch: the `Batch`.
            settings: a `Plan` without rows.
            remote: makes the maker of a step like this one, for a device of this type in another process.
        """
        ...

    def gather(self, values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Return the rows of all processes, and how many come before those of this one; once per step."""
        ...

    def open(self, part: Any) -> None:
        """Agree on the number of micro-batches, before the first of a `Part`."""
        ...

    def spare(self, num_bytes: float) -> None:
        """Note the bytes that a budget leaves free beside each micro-batch of the next `add`."""
        ...

    def next(self) -> None:
        """Note that a micro-batch begins: its rows are there."""
        ...

    def missing(self, part: Any) -> Iterable[Any]:
        """Yield the rows of micro-batches of weight 0 that other processes need, after the last one here."""
        ...

    def meet(self, task: Any, parts: int) -> None:
        """Raise unless each process runs one micro-batch (`parts`): rows of all meet in a layer."""
        ...

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Raise `kind` if other processes wait in the micro-batch that is to run again, for this reason."""
        ...

    def close(self, sums: Any) -> Mapping[str, Number]:
        """Return the weight of each term over all processes, after the last micro-batch of these `Sums`."""
        ...

    def reduce(self, gradients: Gradient) -> Gradient:
        """Return the gradients summed over all processes; after `close`."""
        ...

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of all entries of the gradient, a scalar."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Tell the others, once, that this process has failed. Does nothing between `close` and `reduce`."""
        ...


class Single:
    """The strategy of one process: nothing is added up."""

    is_many = False
    takes_windows = True
    is_lockstep = is_held = False

    def ready(self, model: nn.Module) -> None:
        """Do nothing; parameters have one form."""

    def begin(self, task: Any, settings: Any) -> None:
        """Begin; no other process waits."""

    def carry_out(
        self, task: Any, batch: Any, settings: Any, remote: Callable[[str], Any]
    ) -> StepReport | None:
        """Leave the step to the caller."""

    def gather(self, values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Return the same values."""
        return [*values], 0

    def open(self, part: Any) -> None:
        """Do nothing; no other process runs micro-batches along."""

    def spare(self, num_bytes: float) -> None:
        """Do nothing; gradients are held as they are."""

    def next(self) -> None:
        """Do nothing; no other process runs micro-batches along."""

    def missing(self, part: Any) -> Iterable[Any]:
        """Return nothing; no other process waits."""
        return ()

    def meet(self, task: Any, parts: int) -> None:
        """Do nothing; no other process has rows."""

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Do nothing; no other process waits."""

    def close(self, sums: Any) -> Mapping[str, Number]:
        """Return the weights of this process."""
        return sums.weigh()

    def reduce(self, gradients: Gradient) -> Gradient:
        """Return the same gradients."""
        return gradients

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of all entries."""
        return norm_of(gradients)

    def abandon(self, error: BaseException) -> None:
        """Do nothing; no other process waits."""
