"""What is looked at before a step begins: its parts, read anew each time, and the batch."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batch import Batch, Collate, SampleBatch, TensorBatch
from anybatch.errors import BatchError, OptimizerError
from anybatch.events import Listener
from anybatch.losses.additive import refuse_what_does_not_add_up
from anybatch.losses.resolve import module_of, resolve
from anybatch.losses.summed import SummedLoss
from anybatch.masters import Masters
from anybatch.meetings import batch_norms, refuse
from anybatch.optimize import owned
from anybatch.scale import LossScale
from anybatch.surroundings import Streams
from anybatch.task import Task


class Guard:
    """What must hold before a batch is cut: no meeting that was not allowed, and a loss that adds up.

    Args:
        batch_norm: what a step does with BatchNorm in training mode; None for nothing.
        check: whether a loss of the caller's own is looked at before the first update.
        sparing: whether that look may take no more rows than a micro-batch has, because memory is scarce.

    Attributes:
        streams: which random streams have to be noted, so that a micro-batch can be undone.
    """

    def __init__(self, *, batch_norm: str | None, check: bool, sparing: bool = False) -> None:
        self.batch_norm, self._sparing = batch_norm, sparing
        self.streams = Streams()
        self._looks = 3 if check else 0  # some batches tell nothing

    def before_cut(self, task: Task, batch: Batch, micro_batch: int) -> None:
        """Refuse what would change the result.

        Raises:
            PlanError: rows meet in the model.
            LossError: the loss does not add up.
        """
        self.refuse_meetings(task)
        self.check_loss(task, batch, micro_batch)

    def check_loss(self, task: Task, batch: Batch, micro_batch: int) -> None:
        """Before the first update: whether a loss of the caller's own adds up. Once, if the rows can tell."""
        if self._looks:
            said = refuse_what_does_not_add_up(
                task.loss, task.model, task.modules, batch, micro_batch, sparing=self._sparing
            )
            self._looks = 0 if said else self._looks - 1

    def refuse_meetings(self, task: Task) -> None:
        """Where there is more than one micro-batch: no BatchNorm in training mode unless one was chosen."""
        if self.batch_norm is None:
            refuse(task.model, task.batch_norms)


def gather(
    model: nn.Module,
    loss: object,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    listeners: Sequence[Listener],
    guard: Guard,
    masters: Masters,
    scale: LossScale,
) -> Task:
    """What a step is carried out on. All is read anew: callers unfreeze layers and change settings.

    Raises:
        OptimizerError: there is nothing to train.
    """
    held = owned(optimizers)
    trainable = [p for p in held if p.requires_grad]
    if not trainable:
        raise OptimizerError(
            f"Expected at least one trainable parameter in the optimizer, got {len(held)} that are all "
            "frozen. Set requires_grad=True on what is to be trained."
        )
    resolved = resolve(loss)
    modules = [*model.modules(), *module_of(loss).modules()]  # one walk serves all
    tables = [module._parameters for module in modules]  # pyright: ignore[reportPrivateUsage]
    inside = {p for table in tables for p in table.values() if p is not None}
    return Task(
        model=model,
        modules=modules,
        loss=resolved,
        optimizers=optimizers,
        schedulers=schedulers,
        parameters=trainable,
        others=list(inside.union(held).difference(trainable)),
        # In a loss that sees all rows at once they do not depend on the cut.
        batch_norms=batch_norms(model.modules() if resolved.divided else modules),
        devices={p.device for p in inside},
        listeners=listeners,
        before_cut=guard.before_cut,
        streams=guard.streams,
        masters=masters,
        scale=scale,
    )


def admit(batch: Any, task: Task, collate: Collate | None, *, anywhere: bool = False) -> Batch:
    """Check a batch, before anything is touched.

    Args:
        batch: what the caller hands over.
        task: what it is for.
        collate: builds tensors of samples, if that is what the batch holds.
        anywhere: it need not be on the device of the model, because only its shapes matter.

    Raises:
        BatchError: it cannot be cut, or is not where the model is.
    """
    if collate is not None:
        return SampleBatch(batch, collate)
    logical = TensorBatch(batch)
    # Where the loss is the caller's own function, that may move rows itself.
    if isinstance(task.loss, SummedLoss) and not anywhere:
        strange = {leaf.device for leaf in logical.leaves} - task.devices
        if strange and task.devices:
            raise BatchError(
                f"Expected the batch on the model's device {_names(task.devices)}, got {_names(strange)}. "
                "Move the batch there with .to(device), or write the loss as a function (model, micro) "
                "that moves each micro-batch."
            )
    return logical


def _names(devices: Set[torch.device]) -> str:
    return ", ".join(sorted(str(device) for device in devices))
