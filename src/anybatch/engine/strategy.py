"""Many processes, as the step sees them: add up weights and gradients over all. `Single` is one process."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from anybatch.engine.gradients import Sums


class Agreed(NamedTuple):
    """What all processes together have."""

    totals: Mapping[str, float]  # the summed loss of each term
    rows: int
    dropped: int


class Strategy(Protocol):
    """How the partial sums of several processes become one. All call each method in one order.

    Attributes:
        is_many: whether other processes hold rows of the same batch.
    """

    is_many: bool

    def begin(self, task: Any, settings: Any) -> None:
        """A step or a window of this `Task` begins, with these settings (a `Plan` without rows)."""
        ...

    def gather(self, values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The rows of all processes, and how many come before those of this one; once per step."""
        ...

    def meet(self, task: Any, parts: int) -> None:
        """Rows of all processes meet in a layer: raise unless each runs one micro-batch (`parts`)."""
        ...

    def undo(self, said: str, kind: type[Exception]) -> None:
        """A micro-batch is to run again, for this reason: raise `kind` where other processes wait in it."""
        ...

    def close(self, sums: Any) -> Mapping[str, float]:
        """All micro-batches of an `Accumulator` are done: the weight of each term over all processes."""
        ...

    def reduce(self, gradients: Sums) -> Sums:
        """The gradients, added up over all processes; after `close`."""
        ...

    def abandon(self, error: BaseException) -> None:
        """This process has failed: let the others know, once. Does nothing between `close` and `reduce`."""
        ...


class Single:
    """One process: nothing to add up."""

    is_many = False

    def begin(self, task: Any, settings: Any) -> None:
        """Nobody waits."""

    def gather(self, values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The same."""
        return [*values], 0

    def meet(self, task: Any, parts: int) -> None:
        """Nobody else has rows."""

    def undo(self, said: str, kind: type[Exception]) -> None:
        """Nobody waits."""

    def close(self, sums: Any) -> Mapping[str, float]:
        """The weights here."""
        return sums.weights()

    def reduce(self, gradients: Sums) -> Sums:
        """The same."""
        return gradients

    def abandon(self, error: BaseException) -> None:
        """Nobody waits."""
