"""A loss of the caller's own, observed: a bare mean is taken for the total that a plain loop makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from anybatch.losses.resolve import resolve
from anybatch.losses.terms import Terms
from anybatch.total import Total


class Observed(nn.Module):
    """A user's function, whose totals are noted; a bare mean counts as a total of weight 1.

    That is what a loop that adds up means makes of it.

    Args:
        function: `(model, micro)` to totals or bare scalars.
    """

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.bare = False

    def forward(self, model: nn.Module, micro: Any) -> Any:
        """The function's totals."""
        value = self.function(model, micro)
        if _is_scalar(value):
            self.bare = True
            return Total(value, 1)
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            bare = [name for name, one in named.items() if _is_scalar(one)]
            self.bare = self.bare or bool(bare)
            return {name: Total(one, 1) if name in bare else one for name, one in named.items()}
        return value


def observe(loss: Any) -> Any:
    """A function of the caller's own as one that is observed; any other loss as it is.

    Example:
        >>> is_bare(observe(nn.MSELoss())), is_bare(observe(lambda model, micro: model(micro).mean()))
        (False, False)
    """
    resolved = resolve(loss)
    return replace(resolved, function=Observed(resolved.function)) if isinstance(resolved, Terms) else loss


def is_bare(loss: Any) -> bool:
    """Whether an observed loss has returned a mean that has lost its denominator."""
    return isinstance(loss, Terms) and isinstance(loss.function, Observed) and loss.function.bare


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
