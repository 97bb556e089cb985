"""The loss scale: keeps small float16 gradients from vanishing, and gives way where large ones overflow."""

import copy
import math
from typing import Any

from anybatch.precision.policy import Precision

FIRST_SCALE = 2.0**16  # where a dynamic scale begins
MOST = 2.0**24  # float32 sums of scaled losses stay finite
PATIENCE = 2_000  # updates without overflow, after which it is doubled


class LossScale:
    """What the loss is multiplied by before backward, and gradients are divided by as they are added.

    Always a power of two, so neither changes a digit. Sums hold gradients without scale, so a new scale
    leaves them as they are.

    Args:
        precision: says whether it is fixed, or follows the gradients.

    Attributes:
        value: the scale at hand.

    Example:
        >>> scale = LossScale(Precision(compute="float16", loss_scale=4.0))
        >>> scale.give_way(), scale.value, scale.give_way(), scale.give_way()
        (True, 2.0, True, False)
        >>> scale.begin()
        >>> scale.value
        4.0

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(self, precision: Precision) -> None:
        setting = precision.loss_scale
        self.is_dynamic = setting == "dynamic"
        self._fixed = FIRST_SCALE if self.is_dynamic else float(setting or 1.0)
        self.value = self._fixed
        self._clean = 0  # updates since it last gave way or grew

    def begin(self, limit: float = math.inf) -> None:
        """The next micro-batch: a fixed scale is what it was set to again, or at most the limit."""
        self.value = min(self.value if self.is_dynamic else self._fixed, limit)

    def give_way(self) -> bool:
        """Halve it after an overflow; False where it is 1, so that nothing is left to give."""
        if self.value <= 1.0:
            return False
        self.value /= 2
        self._clean = 0
        return True

    def updated(self) -> None:
        """An update was made: after many without overflow a dynamic scale is doubled."""
        if not self.is_dynamic:
            return
        self._clean += 1
        if self._clean >= PATIENCE:
            self._clean = 0
            self.value = min(2 * self.value, MOST)

    def copy(self) -> "LossScale":
        """One that stands where this one does, for steps that do not count."""
        return copy.copy(self)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"value": self.value, "clean": self._clean}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.value, self._clean = float(state["value"]), int(state["clean"])
