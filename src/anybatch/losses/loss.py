"""What a step asks of a loss: sums now, weights on demand, divisors as soon as they can be known."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from anybatch.batch import Batch
from anybatch.total import Number


class Evaluated(NamedTuple):
    """The terms of one micro-batch.

    Attributes:
        sums: the summed loss of each named term, scalars that carry the graph.
        weigh: counts the weight of each term. Called only where the weights of the whole batch are not known.
    """

    sums: Mapping[str, Tensor]
    weigh: Callable[[], Mapping[str, Number]]


class Loss(Protocol):
    """A loss whose whole-batch value is, term by term, a ratio of sums."""

    @property
    def divided(self) -> bool:
        """True where the value of an uncut batch is the loss itself, not a sum still to be divided."""
        ...

    @property
    def counted(self) -> bool:
        """True where the divisor is exact without weighing the micro-batches again."""
        ...

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The factor of each named term in the loss, 1 where none stands."""
        ...

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model on a micro-batch and sum its losses."""
        ...

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """What each term of this batch is divided by, if the first forward can tell; None if it cannot."""
        ...

    def uncut(self) -> "Loss":
        """The same loss for a batch that is not cut: torch's own reduction, to the bit."""
        ...

    def along(
        self, batch: Batch, micro_batch: int, model: nn.Module, put_back: Callable[[], None]
    ) -> Iterable["Loss"]:
        """The loss for each micro-batch in turn: the same, unless it depends on the rows.

        A loss in which rows meet takes a first pass over the batch here, without graph, before it yields.

        Args:
            batch: the logical batch; `OpenBatch`, of no rows, where a window opens.
            micro_batch: rows of each micro-batch.
            model: what a first pass calls.
            put_back: puts the buffers back to where they stood before the step, so that the second pass
                repeats the first, and updates them once.
        """
        ...
