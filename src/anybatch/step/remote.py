"""A step for the workers of a parameter server: all that it is made of, to be sent to another process"""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.losses import module_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Makes a step like another one, in the process that it is sent to."""

    kind: type
    model: Any
    loss: Any
    optimizers: Any
    device: str = "cpu"
    modes: tuple[torch.dtype, str] = (torch.float32, "highest")
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def of(step: Any, device: str = "cpu") -> "Remote":
        """Return a maker of steps like this one, without the callbacks and schedulers of the driver."""
        settings, planning = step.planning.settings, step.planning
        made = Remote(
            device=device,
            modes=(torch.get_default_dtype(), torch.get_float32_matmul_precision()),
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
        is_ready = all(p.device.type == "cpu" for p in step.model.parameters())
        return made if is_ready else copy.deepcopy(made)._on("cpu")  # where it goes may be no such device

    def _on(self, device: str) -> "Remote":
        for module in (self.model, module_of(self.loss)):
            module.to(device)
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # which follows the parameters
        return self

    def __call__(self, strategy: Any) -> Any:
        """Return the step, on the device, in a process like the driver's."""
        torch.set_default_dtype(self.modes[0])
        torch.set_float32_matmul_precision(self.modes[1])
        if self.device != "cpu":
            self._on(self.device)
        return self.kind(self.model, self.loss, self.optimizers, strategy=strategy, **self.options)
