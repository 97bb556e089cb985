"""The interface of a loss: sums of micro-batches, their weights, and the divisors of the batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from anybatch.core import Batch, Cut, Number


class Evaluated(NamedTuple):
    """The terms of one micro-batch."""

    sums: Mapping[str, Tensor]  # the summed loss of each named term, scalars with a graph
    weigh: Callable[[], Mapping[str, Number]]  # counts the weight of each term, if the batch's is unknown


class EvaluateAgain(Exception):  # noqa: N818
    """A request to undo a micro-batch and evaluate it again: its graph has an unexpected form.

    `evaluate` raises it before the backward, so the sums do not contain the micro-batch. The caller restores
    the state that the forward may have changed (rows, buffers, attributes, random state) and calls `evaluate`
    with the same rows; then it is not raised again. Only a loss that entered `along` raises it.
    """


class Loss(ABC):
    """A loss whose whole-batch value is, term by term, a ratio of sums.

    This base class has one term and is the same for all rows, cut or not.
    """

    __slots__ = ()

    divided = False  # True if `evaluate` returns the loss itself, False if it returns a sum to divide
    counted = True  # True if the divisor is exact without weighing the micro-batches again
    tied = False  # True if a first pass has fixed the cut of the rows
    is_plain = True  # True if `along` returns the same loss for all rows and need not be called
    coefficients: Mapping[str, float] = MappingProxyType({})  # of named terms; 1 for names that are missing

    @abstractmethod
    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model on a micro-batch and sum its losses.

        Raises:
            EvaluateAgain: undo the micro-batch and call `evaluate` once more.
        """

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """Return the divisor of each term of this batch; None if the first forward does not determine it."""
        return first.weigh()

    def uncut(self) -> "Loss":
        """Return the loss for a batch that is not cut: torch's own reduction, bit-identical."""
        return self

    def along(
        self, batch: Batch, sizes: Sequence[int], model: nn.Module, put_back: Callable[[], None]
    ) -> AbstractContextManager["Share"]:
        """Return a context that gives the function `(start, stop) -> loss of these rows` during one step.

        A loss over the outputs of all rows makes its first pass here, before the context yields. After an
        out-of-memory error the function may be called for the same rows again, also in smaller parts.
        """
        return nullcontext(lambda start, stop: self)


Share = Callable[[int, int], Loss]  # (start, stop) -> the loss of these rows


def first_pass_rows(batch: Batch, sizes: Sequence[int]) -> Iterator[Any]:
    """Return the rows of each micro-batch, for a first pass."""
    return (micro.rows for micro in batch.micro_batches(Cut.of_sizes(sizes).parts))
