"""BatchNorm in training mode, whose output depends on the other rows: found, refused or frozen."""

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from torch import nn

from anybatch.core import PlanError, torch_private as private

BatchNorm = private.BatchNorm

#: The caller's choice for BatchNorm in training mode.
BatchNormChoice = Literal["micro", "frozen"]
BATCH_NORM_CHOICES = get_args(BatchNormChoice)


def check_batch_norm(choice: object) -> None:
    """Raise PlanError unless `choice` is None or in `BATCH_NORM_CHOICES`."""
    if choice is not None and choice not in BATCH_NORM_CHOICES:
        raise PlanError(
            f'Expected batch_norm to be one of {BATCH_NORM_CHOICES} or None, got {choice!r}. Choose "micro" '
            'for statistics of each micro-batch, "frozen" for running statistics, or convert the model with '
            "ab.batch_norm_to_group_norm(model)."
        )


def find_batch_norms(modules: Iterable[nn.Module]) -> list[BatchNorm]:
    """Return the modules whose output for a row depends, in their current mode, on the other rows.

    These are all BatchNorms (also SyncBatchNorm, lazy ones and subclasses) in training mode or without
    running statistics, each once, in the order of `modules`, without children. InstanceNorm, GroupNorm and
    LayerNorm treat each row alone.
    """
    found = [module for module in modules if isinstance(module, BatchNorm)]
    return list(dict.fromkeys([norm for norm in found if norm.training or norm.running_mean is None]))


def names_of_batch_norms(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """Return the dotted names of modules for a message: the first three, and the number of others.

    A module outside of the model (of the loss), or the model itself, is named by its class.
    """
    dotted = {module: private.plain_name(name) for name, module in model.named_modules()}
    return listed([dotted.get(module) or type(module).__name__ for module in modules])


def listed(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_batch_norms(model: nn.Module, norms: Sequence[BatchNorm], *, over_ranks: bool = False) -> None:
    """Raise PlanError for BatchNorms whose statistics would depend on the split."""
    if norms:
        whole = 'Step(..., memory="auto") without micro_batch, which is exact: the batch stays '
        whole += "whole, its blocks run again or wait in host memory; "
        raise PlanError(
            f"Expected no BatchNorm in training mode in a batch that is split{' over ranks' * over_ranks}, "
            f"got module {names_of_batch_norms(model, norms)}: its statistics would depend on the split. "
            f"Shortest ways out: {'' if over_ranks else whole}"
            'Options(batch_norm="frozen") for trained weights; model = ab.batch_norm_to_group_norm(model) '
            'to train anew. Inexact: batch_norm="micro".'
        )


def warn_of_untrained(model: nn.Module, norms: Sequence[BatchNorm]) -> None:
    """Warn if all BatchNorms to be frozen have the initial running statistics of untrained layers."""
    is_new = [
        bool((norm.running_mean == 0).all() and (norm.running_var == 1).all())
        for norm in norms
        if norm.running_mean is not None and norm.running_var is not None
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
    """Return a context in which BatchNorms use their running statistics without updating them.

    Each row is treated alone. Weight and bias still train. Raises PlanError for a BatchNorm without running
    statistics.
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
            norm.training = False  # not eval(): children of a subclass, such as a dropout, keep training
        yield
    finally:
        for norm, training in found:
            norm.training = training
