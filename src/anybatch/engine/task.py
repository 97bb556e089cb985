"""What a plan is carried out on: model, loss, optimizers and all that goes with them, as they stand."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batchnorm import BatchNorm
from anybatch.core import Batch, Event, Listener
from anybatch.losses import Loss
from anybatch.precision import LossScale, Masters, Precision
from anybatch.state import Streams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What a plan is carried out on.

    Attributes:
        model: called on micro-batches.
        modules: the modules of the model and of the loss.
        loss: the loss, resolved.
        optimizers: updated in this order.
        schedulers: stepped once per update, after the optimizers.
        parameters: the trainable parameters of the optimizers.
        others: parameters of the model that no optimizer here owns, and frozen ones; their `.grad` takes no
            part in the update and is left alone.
        batch_norms: modules in which rows meet, as they stand.
        devices: where the parameters of the model are.
        listeners: called with every event.
        before_cut: called with this task, the batch and a number of rows that may fit, before a batch that
            was not to be cut is cut after all; raises where that would change the result.
        streams: which random streams besides torch's are noted before a micro-batch.
        masters: the float32 weights of parameters that are stored short.
        scale: what the loss is multiplied by in backward.
    """

    model: nn.Module
    modules: Sequence[nn.Module]
    loss: Loss
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler]
    parameters: Sequence[nn.Parameter]
    others: Sequence[nn.Parameter]
    batch_norms: Sequence[BatchNorm]
    devices: Set[torch.device]
    listeners: Sequence[Listener]
    before_cut: Callable[["Task", Batch, int], None] = lambda task, batch, rows: None
    streams: Streams = field(default_factory=Streams)
    masters: Masters = field(default_factory=Masters)
    scale: LossScale = field(default_factory=lambda: LossScale(Precision()))

    def tell(self, event: Event) -> None:
        """Let the listeners know."""
        for listener in self.listeners:
            listener(event)

    @property
    def kinds(self) -> set[str]:
        """Of the devices that compute."""
        return {device.type for device in self.devices} - {"meta"}
