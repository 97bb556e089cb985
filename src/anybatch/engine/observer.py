"""Observers: what looks at the gradients of a step, or at its micro-batches, and changes nothing."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from anybatch.core import Micro


class Observer:
    """Looks at finished gradients. This one looks at nothing: subclasses override what they need.

    Attempts that are undone are never told. What an observer raises before the update fails the step, and
    everything is as before it.

    Attributes:
        wants_micro: whether `micro` is called; the gradients of a micro-batch are then held apart.
        wants_updated: whether `updated` is called.

    Example:
        >>> class Norms(Observer):
        ...     def update(self, gradients):
        ...         self.norms = {name: float(one.norm()) for name, one in gradients.items()}
    """

    wants_micro = False
    wants_updated = False

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Once per update, before clipping: the gradient of the batch's loss, by name of the parameter."""

    def updated(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """After the optimizers have stepped: the parameters by name."""

    def micro(self, micro: Micro, gradients: Mapping[str, Sequence[Tensor]], scale: float) -> None:
        """A micro-batch is done: what it adds to each parameter's gradient, before division by the scale.

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
        """A micro-batch begins; sums of gradients take `held` bytes by now."""

    def forward_done(self) -> None:
        """Its loss is computed."""

    def done(self) -> None:
        """Its gradients are in the sums."""

    def begin_update(self) -> None:
        """The optimizers are about to be stepped."""

    def update_done(self) -> None:
        """They have been."""

    def close(self) -> None:
        """Drop what has begun and is not done."""
