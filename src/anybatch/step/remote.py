"""A step for the workers of a parameter server: all that it is made of, to be sent to another process"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.losses import module_of
from anybatch.step.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Makes a step like another one, in the process that it is sent to."""

    kind: type
    model: Any
    loss: Any
    optimizers: Any
    device: str
    modes: tuple[torch.dtype, str]  # default dtype, precision of matrix products
    keywords: dict[str, Any]
    options: Options

    @staticmethod
    def of(step: Any, device: str = "cpu") -> "Remote":
        """Return a maker of steps like this one, without the callbacks and schedulers of the driver."""
        planning = step.planning
        made = Remote(
            device=device,
            modes=(torch.get_default_dtype(), torch.get_float32_matmul_precision()),
            kind=type(step),
            model=step.model,
            loss=step.loss,
            optimizers=step.optimizers,
            keywords={
                "micro_batch": planning.micro_batch,
                "memory": None if planning.budget is None else planning.budget.memory,
                "collate": step.collate,
                "precision": step.precision,
            },
            options=replace(step.options, strategy="local", scheduler=None),
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
        options = replace(self.options, strategy=strategy)
        return self.kind(self.model, self.loss, self.optimizers, options=options, **self.keywords)
