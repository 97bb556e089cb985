"""Strategy: how the sums of several processes become one; by itself that of one process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from anybatch.core import Number, StepReport
from anybatch.engine.gradients import Gradient
from anybatch.engine.update import norm_of


class Agreed(NamedTuple):
    """The totals of all processes together."""

    totals: Mapping[str, float]  # the summed loss of each term
    rows: int
    dropped: int
    reduced: Gradient | None = None  # finished, if it was summed before `Sums.finish`


class Strategy:
    """The work of several processes on one batch; this one is a single process, which adds nothing up.

    All processes call each method in one order. Others override what they do otherwise.

    Attributes:
        is_many: other processes hold rows of the same batch.
        is_elsewhere: whole steps are made elsewhere (`carry_out_elsewhere`), and there are no windows.
        is_lockstep: each micro-batch holds collectives, so all processes run equally many, and none may run
            one again alone.
        is_held: gradients are added up over processes after the last micro-batch of this step only.
    """

    is_many = False
    is_elsewhere = is_lockstep = is_held = False

    def ready(self, model: nn.Module) -> None:
        """Bring the parameters of a model into the form between steps, before the parts are gathered."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for forwards without backward, of which all processes run equally many."""
        return nullcontext()

    def begin(self, task: Any, settings: Any) -> None:
        """Begin a step or a window of a `Task`, with a `Plan` without rows; refuse what cannot be done."""

    def carry_out_elsewhere(
        self, task: Any, batch: Any, settings: Any, remote: Callable[[str], Any]
    ) -> StepReport:
        """Make a whole step elsewhere, and return its report; only of a strategy that `is_elsewhere`.

        Args:
            task: the `Task`.
            batch: the `Batch`.
            settings: a `Plan` without rows.
            remote: makes the maker of a step like this one, for a device of this type in another process.
        """
        raise NotImplementedError(f"{type(self).__name__} is_elsewhere, so it overrides this.")

    def first(self, micros: Iterable[tuple[Any, int]]) -> Iterable[tuple[Any, int]]:
        """Return the micro-batches of a first pass, with their rows; then some of 0 rows that others need."""
        return micros

    def gather(self, values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Return the rows of all processes, and how many come before those of this one; once per step."""
        return [*values], 0

    def open(self, part: Any) -> None:
        """Agree on the number of micro-batches, before the first of a `Part`."""

    def spare(self, num_bytes: float) -> None:
        """Note the bytes that a budget leaves free beside each micro-batch of the next `add`."""

    def next(self) -> None:
        """Note that a micro-batch begins: its rows are there."""

    def missing(self, part: Any) -> Iterable[Any]:
        """Yield the rows of micro-batches of weight 0 that other processes need, after the last one here."""
        return ()

    def meet(self, task: Any, parts: int) -> None:
        """Raise unless each process runs one micro-batch (`parts`): rows of all meet in a layer."""

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Raise `kind` if other processes wait in the micro-batch that is to run again, for this reason."""

    def flow(self, ahead: Callable[[], Any]) -> None:
        """Note that the last backward begins, also if it begins again; `ahead` returns the sums after it.

        Called only if there are several processes, and each gradient is finished once in this backward.
        """

    def close(self, sums: Any) -> Mapping[str, Number]:
        """Return the weight of each term over all processes, after the last micro-batch of these `Sums`."""
        return sums.weigh()

    def reduce(self, gradients: Gradient) -> Gradient:
        """Return the gradients summed over all processes; after `close`."""
        return gradients

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of all entries of the gradient, a scalar."""
        return norm_of(gradients)

    def abandon(self, error: BaseException) -> None:
        """Tell the others, once, that this process has failed. Does nothing between `close` and `reduce`."""
