"""BatchNorm in training mode, in which rows of a batch meet: found, refused or frozen."""

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from torch import nn

from anybatch.core import PlanError
from anybatch.core import torch_private as private

BatchNorm = private.BatchNorm

#: What a caller may choose for BatchNorm in training mode; None where nothing was chosen.
BatchNormChoice = Literal["micro", "frozen"]
BATCH_NORM_CHOICES = get_args(BatchNormChoice)


def check_batch_norm(choice: object) -> None:
    """Refuse with a PlanError what is neither None nor one of `BATCH_NORM_CHOICES`."""
    if choice == "exact":
        raise PlanError(
            f"Expected batch_norm to be one of {BATCH_NORM_CHOICES} or None, got {choice!r}, which is not "
            "available yet. ab.batch_norm_to_group_norm(model) makes every cut exact."
        )
    if choice is not None and choice not in BATCH_NORM_CHOICES:
        raise PlanError(
            f'Expected batch_norm to be one of {BATCH_NORM_CHOICES} or None, got {choice!r}. Choose "micro" '
            'for statistics of each micro-batch, "frozen" for running statistics, or convert the model with '
            "ab.batch_norm_to_group_norm(model)."
        )


def find_batch_norms(modules: Iterable[nn.Module]) -> list[BatchNorm]:
    """The modules whose output for a row depends, in their present state, on the other rows.

    That is every BatchNorm (SyncBatchNorm, lazy ones and subclasses too) in training mode or without running
    statistics. Each comes once, in the order of `modules`, whose children are not looked at. InstanceNorm,
    GroupNorm and LayerNorm look at one row at a time.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.InstanceNorm1d(3))
        >>> find_batch_norms(model.modules()) == [model[1]]
        True
    """
    found = [module for module in modules if isinstance(module, BatchNorm)]
    return list(dict.fromkeys([norm for norm in found if norm.training or norm.running_mean is None]))


def names_of_batch_norms(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """The dotted names of modules, for a message: the first three and how many more.

    A module that the model does not hold (the loss's, or the model itself) is named by its class.
    """
    dotted = {module: private.plain_name(name) for name, module in model.named_modules()}
    told = [dotted.get(module) or type(module).__name__ for module in modules]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def refuse_batch_norms(model: nn.Module, norms: Sequence[BatchNorm], *, over_ranks: bool = False) -> None:
    """Refuse with a PlanError BatchNorms whose statistics would depend on the split."""
    if norms:
        whole = 'Step(..., memory="auto") without micro_batch, which keeps the batch whole; '
        raise PlanError(
            f"Expected no BatchNorm in training mode in a batch that is split{' over ranks' * over_ranks}, "
            f"got module {names_of_batch_norms(model, norms)}: its statistics would depend on the split. "
            f"Shortest ways out: {'' if over_ranks else whole}"
            'Step(..., batch_norm="frozen") for trained weights; model = ab.batch_norm_to_group_norm(model) '
            'to train anew. Inexact: batch_norm="micro".'
        )


def warn_of_untrained(model: nn.Module, norms: Sequence[BatchNorm]) -> None:
    """Warn if BatchNorms that are to be frozen hold the running statistics of a layer that never trained."""
    pairs = [(norm.running_mean, norm.running_var) for norm in norms]
    is_new = [
        bool((mean == 0).all() and (var == 1).all())
        for mean, var in pairs
        if mean is not None and var is not None
    ]
    if is_new and all(is_new):
        warnings.warn(
            f'Expected trained running statistics with batch_norm="frozen", got those of new layers in '
            f"{names_of_batch_norms(model, norms)}: they would not normalise at all. Load trained weights, "
            "or use ab.batch_norm_to_group_norm(model).",
            stacklevel=2,
        )


@contextmanager
def frozen_batch_norms(modules: Sequence[BatchNorm]) -> Generator[None]:
    """Let BatchNorms use their running statistics, and not update them, for a while.

    Rows do not meet in them meanwhile. Their weight and bias still train. One that holds no running
    statistics is refused with a PlanError.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> with frozen_batch_norms([norm]):
        ...     norm.training
        False
        >>> norm.training
        True
    """
    for norm in modules:
        if norm.running_mean is None:
            raise PlanError(
                f"Expected a BatchNorm with running statistics to freeze, got {norm}. Make it with "
                "track_running_stats=True, or convert it with ab.batch_norm_to_group_norm(model)."
            )
    found = [(norm, norm.training) for norm in modules]
    try:
        for norm in modules:
            norm.training = False  # not eval(): what a subclass holds, such as a dropout, goes on training
        yield
    finally:
        for norm, training in found:
            norm.training = training
