"""What a batch must be before a step begins: rows that can be cut, on the device of the model."""

from collections.abc import Set
from typing import Any

import torch

from anybatch.batch import Batch, Collate, SampleBatch, TensorBatch
from anybatch.errors import BatchError
from anybatch.execute import Task
from anybatch.losses.summed import SummedLoss


def admit(batch: Any, task: Task, collate: Collate | None) -> Batch:
    """Check a batch, before anything is touched.

    Args:
        batch: what the caller hands over.
        task: what it is for.
        collate: builds tensors of samples, if that is what the batch holds.

    Raises:
        BatchError: it cannot be cut, or is not where the model is.
    """
    if collate is not None:
        return SampleBatch(batch, collate)
    logical = TensorBatch(batch)
    if isinstance(task.loss, SummedLoss):  # otherwise the caller's function may move rows itself
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
