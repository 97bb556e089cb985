"""Rules by which an asynchronous parameter server adds pushes: unchanged, or divided.

The result is *changed*: workers compute from parameters that others have changed meanwhile, and the order in
which pushes arrive is part of the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from anybatch.core import PlanError, all_finite

RuleName = Literal["accumulate", "normalize", "dynsgd"]

_DIVISORS: Mapping[RuleName, Callable[[int, int], int]] = {  # functions of staleness and steps
    "accumulate": lambda staleness, steps: 1,
    "normalize": lambda staleness, steps: steps,
    "dynsgd": lambda staleness, steps: staleness + 1,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a server: it adds each push, divided by an integer."""

    name: RuleName

    def apply(self, parameters: Tensor, pushed: Tensor, *, staleness: int, steps: int) -> None:
        """Add a push to flat parameters, in place; raise PlanError, and add nothing, if it is invalid.

        `pushed` is the sum of a worker's `steps` local updates since its pull, learning rate included;
        `staleness` is the number of pushes of others since then.
        """
        if pushed.shape != parameters.shape:
            raise PlanError(
                f"Expected a push of shape {tuple(parameters.shape)}, as the parameters have, got "
                f"{tuple(pushed.shape)}. Start the worker with the server's model."
            )
        if not all_finite([pushed]):
            bad = int((~torch.isfinite(pushed)).sum())
            raise PlanError(
                f"Expected finite numbers in a push, got NaN or infinity in {bad} of {pushed.numel()}. "
                "Pull again; lower the learning rate or divide pushes if it comes back."
            )
        divisor = _DIVISORS[self.name](staleness, steps)
        parameters.add_(pushed if divisor == 1 else pushed / divisor)


def make_rule(name: RuleName) -> Rule:
    """Return the rule of this name, for a server whose workers do not wait for each other.

    A worker pulls the parameters, makes `steps` local updates and pushes their sum `p`. Meanwhile `staleness`
    pushes of others were applied. The server adds:

    - "accumulate": `p`. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1
      (Downpour SGD).
    - "normalize": `p / steps`, accumulated gradient normalization. Hermans, Spanakis and Moeckel,
      "Accumulated Gradient Normalization", ACML 2017.
    - "dynsgd": `p / (staleness + 1)`. Jiang et al., "Heterogeneity-aware Distributed Parameter Servers",
      SIGMOD 2017 (DynSGD).

    With one local update and no push of others in between, all three add `p`; docs/asynchronous.md has more.
    """
    if name not in get_args(RuleName):
        raise PlanError(
            f"Expected a rule for asynchronous pushes, one of {', '.join(get_args(RuleName))}, got {name!r}. "
            "Choose one of these names."
        )
    return Rule(name)
