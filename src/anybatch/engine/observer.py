"""Observers: what looks at the gradients of a step, or at its micro-batches, and changes nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from anybatch.core import Micro


class Observer:
    """Looks at finished gradients. This one looks at nothing: subclasses override what they need.

    Micro-batches that are undone are never told; where a whole step begins again, `begin` says so. What an
    observer raises before the update fails the step, and everything is as before it.

    Attributes:
        name: under which its records stand in a log; empty for none.
        wants_micro: whether `micro` is called; the gradients of a micro-batch are then held apart.
        wants_updated: whether `updated` is called.
        is_due: whether the next step is to call `micro`, where it is wanted; False makes that step cheaper.

    Example:
        >>> class Norms(Observer):
        ...     def update(self, gradients):
        ...         self.norms = {name: float(one.norm()) for name, one in gradients.items()}
    """

    name = ""
    wants_micro = False
    wants_updated = False
    is_due = True

    def begin(self, done: int) -> None:
        """Micro-batches follow, at first or again; only the first `done` of those told so far count."""

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Once per update, before clipping: the gradient of the batch's loss, by name of the parameter."""

    def updated(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """After the optimizers have stepped: the parameters by name."""

    def record(self) -> Mapping[str, Any]:
        """Return the entries of a log for the last update, as JSON can hold them; empty for none."""
        return {}

    def micro(self, micro: Micro, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        """Receive what a micro-batch adds to each parameter's gradient, before division by the scale.

        Args:
            micro: the rows.
            gradients: in the dtype in which they arrive; several where terms are divided one by one.
            scale: the loss scale, and provisional divisors, that they are multiplied by.
        """


class Reader:
    """Reads what micro-batches and the update cost. This one reads nothing: override what is needed.

    What fails is told to `close`; then a micro-batch may begin again.
    """

    def begin(self, micro: Micro, held: int) -> None:
        """Note that a micro-batch begins; the gradient sums hold `held` bytes."""

    def forward_done(self) -> None:
        """Note that its loss is computed."""

    def done(self) -> None:
        """Note that its gradients are in the sums."""

    def begin_update(self) -> None:
        """Note that the optimizers are about to be stepped."""

    def update_done(self) -> None:
        """They have been."""

    def close(self) -> None:
        """Drop what has begun and is not done."""
