"""Many processes, as the step sees them: add up weights and gradients over all. `Single` is one process."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class Strategy(Protocol):
    """How the partial sums of several processes become one. All call each method in one order."""

    def close(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """All micro-batches are done: the weight of each term, added up over all processes."""
        ...

    def reduce(self, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The gradients, added up over all processes."""
        ...

    def abandon(self, error: BaseException) -> None:
        """This process has failed: let the others know, once. Does nothing after `close`."""
        ...


class Single:
    """One process: nothing to add up."""

    def close(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """The same."""
        return weights

    def reduce(self, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The same."""
        return gradients

    def abandon(self, error: BaseException) -> None:
        """Nobody waits."""
