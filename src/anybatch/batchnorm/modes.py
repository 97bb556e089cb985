"""BatchNorm in training mode, in which rows of a batch meet: found, refused or frozen."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from torch import nn

from anybatch.core import PlanError
from anybatch.core import torch_private as private

BatchNorm = private.BatchNorm

#: What a caller may choose for BatchNorm in training mode; None where nothing was chosen.
BATCH_NORM_CHOICES = ("micro", "frozen")


def check_batch_norm(choice: object) -> None:
    """Refuse what is no choice for BatchNorm.

    Raises:
        PlanError: it is none of `None`, `"micro"` and `"frozen"`.

    Example:
        >>> check_batch_norm("micro")
        >>> check_batch_norm("frozen")
        >>> check_batch_norm(None)
    """
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

    That is every BatchNorm (SyncBatchNorm, lazy ones and subclasses too) in training mode, and in evaluation
    mode one that holds no running statistics: it takes those of the batch then too. InstanceNorm, GroupNorm
    and LayerNorm look at one row at a time.

    Args:
        modules: looked at one by one; their children are not.

    Returns:
        Each once, in the order of `modules`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.InstanceNorm1d(3))
        >>> find_batch_norms(model.modules()) == [model[1]]
        True
        >>> find_batch_norms(model.eval().modules())
        []
    """
    found = [module for module in modules if isinstance(module, BatchNorm)]
    return list(dict.fromkeys([norm for norm in found if norm.training or norm.running_mean is None]))


def names_of_batch_norms(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """The dotted names of modules, for a message: the first three and how many more.

    A module that the model does not hold (the loss's, or the model itself) is named by its class.

    Example:
        >>> model = nn.Sequential(*[nn.BatchNorm1d(2) for _ in range(20)])
        >>> names_of_batch_norms(model, list(model)[:2])
        '0, 1'
        >>> names_of_batch_norms(model, model)
        '0, 1, 2 and 17 more'
    """
    dotted = {module: name for name, module in model.named_modules()}
    told = [dotted.get(module) or type(module).__name__ for module in modules]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def refuse_batch_norms(model: nn.Module, norms: Sequence[BatchNorm]) -> None:
    """Refuse BatchNorms whose statistics would depend on the cut.

    Raises:
        PlanError: there is one; the message names it and the ways out.

    Example:
        >>> refuse_batch_norms(nn.Linear(1, 1), [])
    """
    if norms:
        raise PlanError(
            "Expected no BatchNorm in training mode where there is more than one micro-batch, got "
            f"{names_of_batch_norms(model, norms)}: each micro-batch has its own statistics, so the "
            "result would depend on the cut. Convert the model with "
            "ab.batch_norm_to_group_norm(model), or choose "
            'Step(batch_norm="frozen") for the running statistics or "micro" to accept that it is inexact, '
            "or leave the batch uncut."
        )


@contextmanager
def frozen_batch_norms(modules: Sequence[BatchNorm]) -> Generator[None]:
    """Let BatchNorms use their running statistics, and not update them, for a while.

    Rows do not meet in them meanwhile. Their weight and bias still train. Afterwards, also after an error,
    each is in the mode it was in.

    Args:
        modules: BatchNorms with running statistics, as `find_batch_norms` finds them.

    Raises:
        PlanError: one holds no running statistics.

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
