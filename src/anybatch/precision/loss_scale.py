"""The loss scale: keeps small float16 gradients from vanishing, and is halved on overflow."""

import copy
import math
from typing import Any

from anybatch.precision.policy import Precision

FIRST_SCALE = 2.0**16  # first value of a dynamic scale
MOST = 2.0**24  # float32 sums of scaled losses stay finite
PATIENCE = 2_000  # updates without overflow before it is doubled


class LossScale:
    """The factor of the loss before backward, a power of two; gradients are divided by it as they are added.

    Gradient sums hold unscaled gradients, so they stay valid when `value`, the current scale, changes.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(self, precision: Precision) -> None:
        setting = precision.loss_scale
        self.is_on, self.is_dynamic = setting is not None, setting == "dynamic"
        self._fixed = FIRST_SCALE if self.is_dynamic else float(setting or 1.0)
        self.value = self._fixed
        self._clean = 0  # updates since it last changed

    def begin(self, limit: float = math.inf) -> None:
        """Begin a micro-batch: restore a fixed scale; keep the scale at or below the limit."""
        self.value = min(self.value if self.is_dynamic else self._fixed, limit)

    def give_way(self) -> bool:
        """Halve the scale after an overflow; return False if it is 1 already."""
        if self.value <= 1.0:
            return False
        self.value /= 2
        self._clean = 0
        return True

    def updated(self) -> None:
        """Count an update: after many without overflow a dynamic scale is doubled."""
        if not self.is_dynamic:
            return
        self._clean += 1
        if self._clean >= PATIENCE:
            self._clean = 0
            self.value = min(2 * self.value, MOST)

    def copy(self) -> "LossScale":
        """Return a copy, for steps that do not count."""
        return copy.copy(self)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "clean": self._clean}

    def load(self, state: dict[str, Any]) -> None:
        """Load the output of `state`."""
        self.value, self._clean = float(state["value"]), int(state["clean"])
