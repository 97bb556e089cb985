"""A step for the workers of a parameter server: all that it is made of, to be sent to another process"""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Makes a step like another one, in the process that it is sent to."""

    kind: type
    model: Any
    loss: Any
    optimizers: Any
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def of(step: Any) -> "Remote":
        """What makes steps like this one, without what the driver alone does: listeners, schedulers."""
        settings, planning = step.planning.settings, step.planning
        return Remote(
            kind=type(step),
            model=step.model,
            loss=step.loss,
            optimizers=step.optimizers,
            options={
                "micro_batch": planning.micro_batch,
                "memory": None if planning.budget is None else planning.budget.memory,
                "recompute": dict(settings.blocks) or None,
                "clip_norm": None if math.isinf(settings.clip_norm) else settings.clip_norm,
                "collate": step.collate,
                "order": step.order,
                "accumulate": settings.accumulation_dtype,
                "compensated": settings.compensated,
                "batch_norm": settings.batch_norm,
                "precision": step.precision,
                "check": step.guard.checks,
            },
        )

    def __call__(self, strategy: Any) -> Any:
        """The step."""
        return self.kind(self.model, self.loss, self.optimizers, strategy=strategy, **self.options)
