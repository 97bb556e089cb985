"""What a step asks of a loss: sums now, weights on demand, divisors as soon as they can be known."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from anybatch.core import Batch, Cut, Number


class Evaluated(NamedTuple):
    """The terms of one micro-batch."""

    sums: Mapping[str, Tensor]  # the summed loss of each named term, scalars that carry the graph
    # counts the weight of each term. Called only where the weights of the whole batch are not known.
    weigh: Callable[[], Mapping[str, Number]]


class EvaluateAgain(Exception):  # noqa: N818
    """What a forward left in the graph is not what was expected: undo the micro-batch and evaluate it again.

    `evaluate` raises it before anything flows back, so nothing of the micro-batch is in the sums. Whoever
    called puts back what the forward may have changed (rows, buffers, attributes, random streams) and calls
    `evaluate` with the same rows: the second time it does not raise this. Only a loss that entered `along`
    raises it.
    """


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
    def tied(self) -> bool:
        """True where a first pass has fixed how the rows are cut."""
        ...

    @property
    def is_plain(self) -> bool:
        """True where `along` does nothing and gives the same loss for all rows, so that it is not called."""
        ...

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The factor of each named term in the loss, 1 where none stands."""
        ...

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model on a micro-batch and sum its losses.

        Raises:
            EvaluateAgain: it is to be undone, and called once more.
        """
        ...

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """What each term of this batch is divided by, if the first forward can tell; None if it cannot."""
        ...

    def uncut(self) -> "Loss":
        """The same loss for a batch that is not cut: torch's own reduction, to the bit."""
        ...

    def along(
        self, batch: Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> AbstractContextManager["Share"]:
        """What gives the loss for any rows while the batch goes through: the same, unless it depends on them.

        A loss in which rows meet takes a first pass over the batch here, without graph, before it yields. The
        same rows may be asked for again, or in other parts, where memory ran out in them.

        Args:
            batch: the logical batch; `OpenBatch`, of no rows, where a window opens.
            sizes: rows of each micro-batch.
            model: what a first pass calls.
            put_back: puts attributes and buffers back to where they stood before the step, so that the second
                pass repeats the first, and updates them once.
        """
        ...


def first_pass_rows(batch: Batch, sizes: Sequence[int]) -> Iterator[Any]:
    """The rows of each micro-batch, for a first pass."""
    return (micro.rows for micro in batch.micro_batches(Cut.of_sizes(sizes).parts))


Share = Callable[[int, int], Loss]  # (start, stop) -> the loss of these rows
NO_COEFFICIENTS: Mapping[str, float] = MappingProxyType({})


class Plain:
    """What most losses answer: one term, and the same loss for all rows, cut or not."""

    __slots__ = ()

    counted = True
    tied = False
    is_plain = True
    coefficients: Mapping[str, float] = NO_COEFFICIENTS

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """The weight to be reported; the value is divided already."""
        return first.weigh()

    def uncut(self: Loss) -> Loss:
        """The same loss."""
        return self

    def along(
        self: Loss, batch: Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> AbstractContextManager[Share]:
        """The same loss for all rows."""
        return nullcontext(lambda start, stop: self)
