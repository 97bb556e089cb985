"""What is looked at before a step begins: its parts, read anew each time, and the batch."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.batchnorm import find_batch_norms
from anybatch.core import (
    Batch,
    BatchError,
    Collate,
    Listener,
    OptimizerError,
    PlanError,
    SampleBatch,
    TensorBatch,
)
from anybatch.engine import Task, check_optimizers, check_schedulers, owned
from anybatch.losses import SummedLoss, check_loss, module_of, resolve
from anybatch.precision import Working
from anybatch.step.guard import Guard


def check(
    model: object, loss: object, optimizer: object, scheduler: object
) -> tuple[tuple[Optimizer, ...], tuple[LRScheduler, ...]]:
    """Refuse parts that do not belong together; optimizers and schedulers as tuples.

    Raises:
        PlanError, LossError, OptimizerError: what is wrong with them.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"Expected the model to be a torch.nn.Module, got {type(model).__name__}. Wrap it in a module."
        )
    check_loss(loss)
    optimizers = check_optimizers(optimizer, [*model.parameters(), *module_of(loss).parameters()])
    return optimizers, check_schedulers(() if scheduler is None else scheduler, optimizers)


def gather(
    model: nn.Module,
    loss: object,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    listeners: Sequence[Listener],
    guard: Guard,
    working: Working,
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
        batch_norms=find_batch_norms(model.modules() if resolved.divided else modules),
        devices={p.device for p in inside},
        listeners=listeners,
        before_cut=guard.before_cut,
        streams=guard.streams,
        masters=working.masters,
        scale=working.scale,
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
        if strange and any(device.type == "meta" for device in task.devices):
            raise BatchError(
                f"Expected the batch on the model's device {_names(task.devices)}, got {_names(strange)}. To "
                'plan, name the device to plan for, as in device="cuda" or --device cuda; to run the model, '
                "give it real weights, as in model.to_empty(device=...)."
            )
        if strange and task.devices:
            raise BatchError(
                f"Expected the batch on the model's device {_names(task.devices)}, got {_names(strange)}. "
                "Move the batch there with .to(device), or write the loss as a function (model, micro) "
                "that moves each micro-batch."
            )
    return logical


def _names(devices: Set[torch.device]) -> str:
    return ", ".join(sorted(str(device) for device in devices))
