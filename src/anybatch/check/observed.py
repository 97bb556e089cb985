"""A loss of the caller's own, observed: a bare mean is taken for the total that a plain loop makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from anybatch.core import Total
from anybatch.losses import Terms, call_loss, resolve

_NAME = "loss"  # of a term that comes without one


class Observed(nn.Module):
    """A user's function, whose totals are noted; a bare mean counts as a total of weight 1.

    That is what a loop that adds up means makes of it.

    Args:
        function: `(model, micro)` to totals or bare scalars.

    Attributes:
        bare: terms that came as bare means.
    """

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.bare: frozenset[str] = frozenset()

    def forward(self, model: nn.Module, micro: Any) -> Any:
        """The function's totals."""
        value = call_loss(self.function, model, micro)
        if _is_scalar(value):
            self.bare |= {_NAME}
            return Total(value, 1)
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            bare = [name for name, one in named.items() if _is_scalar(one)]
            self.bare |= set(bare)
            return {name: Total(one, 1) if name in bare else one for name, one in named.items()}
        return value


def observe(loss: Any) -> Any:
    """A function of the caller's own as one that is observed; any other loss as it is.

    Example:
        >>> bare_terms(observe(nn.MSELoss())), bare_terms(observe(lambda model, micro: model(micro).mean()))
        (frozenset(), frozenset())
    """
    resolved = resolve(loss)
    return replace(resolved, function=Observed(resolved.function)) if isinstance(resolved, Terms) else loss


def bare_terms(loss: Any) -> frozenset[str]:
    """The terms of which an observed loss has returned means that have lost their denominators."""
    function = loss.function if isinstance(loss, Terms) else None
    return function.bare if isinstance(function, Observed) else frozenset()


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
