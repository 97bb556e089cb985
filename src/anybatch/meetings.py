"""Meetings: where rows of one batch meet inside a model, found, frozen or converted."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.errors import PlanError

BatchNorm = _BatchNorm  # torch names it as if nobody needed it

#: What a caller may choose for BatchNorm in training mode; None where nothing was chosen.
CHOICES = ("micro", "frozen")

# Of images a GroupNorm knows that each channel brings many values. The others may be vectors, one value per
# channel: in a group of one channel such a value is its own mean, and nothing is left of it but the bias. 16
# channels per group is the paper's other setting (table 3). Two, because groups of one channel are
# InstanceNorm, its worst.
_LEAST_CHANNELS: dict[type[BatchNorm], int] = {
    nn.BatchNorm1d: 16,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 2,
    nn.SyncBatchNorm: 16,
}


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
            f"Expected batch_norm to be one of {CHOICES} or None, got {choice!r}, which is not available "
            "yet. ab.batch_norm_to_group_norm(model) makes every cut exact."
        )
    if choice is not None and choice not in CHOICES:
        raise PlanError(
            f'Expected batch_norm to be one of {CHOICES} or None, got {choice!r}. Choose "micro" for '
            'statistics of each micro-batch, "frozen" for running statistics, or convert the model with '
            "ab.batch_norm_to_group_norm(model)."
        )


def batch_norms(modules: Iterable[nn.Module]) -> list[BatchNorm]:
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
        >>> batch_norms(model.modules()) == [model[1]]
        True
        >>> batch_norms(model.eval().modules())
        []
    """
    found = [module for module in modules if isinstance(module, BatchNorm)]
    return list(dict.fromkeys([norm for norm in found if norm.training or norm.running_mean is None]))


def names(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """The dotted names of modules, for a message: the first three and how many more.

    A module that the model does not hold (the loss's, or the model itself) is named by its class.

    Example:
        >>> model = nn.Sequential(*[nn.BatchNorm1d(2) for _ in range(20)])
        >>> names(model, list(model)[:2])
        '0, 1'
        >>> names(model, model)
        '0, 1, 2 and 17 more'
    """
    dotted = {module: name for name, module in model.named_modules()}
    told = [dotted.get(module) or type(module).__name__ for module in modules]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def refuse(model: nn.Module, norms: Sequence[BatchNorm]) -> None:
    """Refuse BatchNorms whose statistics would depend on the cut.

    Raises:
        PlanError: there is one; the message names it and the ways out.

    Example:
        >>> refuse(nn.Linear(1, 1), [])
    """
    if norms:
        raise PlanError(
            "Expected no BatchNorm in training mode where there is more than one micro-batch, got "
            f"{names(model, norms)}: each micro-batch has its own statistics, so the result would depend on "
            "the cut. Convert the model with ab.batch_norm_to_group_norm(model), or choose "
            'Step(batch_norm="frozen") for the running statistics or "micro" to accept that it is inexact, '
            "or leave the batch uncut."
        )


@contextmanager
def frozen(modules: Sequence[BatchNorm]) -> Generator[None]:
    """Let BatchNorms use their running statistics, and not update them, for a while.

    Rows do not meet in them meanwhile. Their weight and bias still train. Afterwards, also after an error,
    each is in the mode it was in.

    Args:
        modules: BatchNorms with running statistics, as `batch_norms` finds them.

    Raises:
        PlanError: one holds no running statistics.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> with frozen([norm]):
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


def batch_norm_to_group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Put a GroupNorm in the place of every BatchNorm, so that rows no longer meet and every cut is exact.

    In place, as `torch.nn.SyncBatchNorm.convert_sync_batchnorm`. Each GroupNorm holds the very parameters of
    the BatchNorm it replaces, so an optimizer made before stays valid; eps and the training flag are kept,
    running statistics are dropped, from the state dict too. It is another function of its input: convert
    before training, or fine-tune after.

    The number of groups is the largest divisor of the channels that is at most `groups` and leaves at least 2
    channels to a group; at least 16 in `BatchNorm1d` and `SyncBatchNorm`, whose input may be vectors. Where
    there are not as many channels, one group holds all of them.

    Args:
        model: changed in place.
        groups: the most groups of a GroupNorm.

    Returns:
        The model; the new module where the model is itself a BatchNorm.

    Raises:
        PlanError: groups is less than 1, or a BatchNorm cannot be replaced: it is lazy and has not seen a
            batch, is of a subclass (which may do more than normalise), or carries hooks. Nothing has been
            changed then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 5), nn.BatchNorm2d(64), nn.Tanh())
        >>> weight = model[1].weight
        >>> batch_norm_to_group_norm(model)[1].num_groups
        32
        >>> model[1].weight is weight
        True

    Source: Wu and He 2018, "Group Normalization", section 3.
    """
    if not isinstance(groups, int) or groups < 1:
        raise PlanError(
            f"Expected groups to be an integer of at least 1, got {groups!r}. The paper takes 32."
        )
    places = dict(model.named_modules(remove_duplicate=False))  # a shared module stands under every name
    norms = {norm: name for name, norm in places.items() if isinstance(norm, BatchNorm)}
    for norm, name in norms.items():
        _check_replaceable(norm, name or "the model")
    replaced = {norm: _group_norm(norm, groups) for norm in norms}
    if isinstance(model, BatchNorm):
        return replaced[model]
    for name, module in places.items():
        if isinstance(module, BatchNorm):
            model.set_submodule(name, replaced[module])
    return model


def _check_replaceable(norm: BatchNorm, name: str) -> None:
    came = f"{type(norm).__name__} at {name}"
    if isinstance(norm, LazyModuleMixin):
        raise PlanError(
            f"Expected a BatchNorm that knows its channels, got {came}. Run the model once, then convert."
        )
    if type(norm) not in _LEAST_CHANNELS:
        raise PlanError(
            f"Expected a BatchNorm of torch, got {came}. A class of its own may do more than normalise: "
            "replace it yourself."
        )
    if isinstance(norm, nn.BatchNorm1d) and norm.num_features == 1:
        raise PlanError(
            f"Expected a BatchNorm1d of more than one channel, got {came} with {norm.num_features}: of a "
            "single number nothing is left once its own mean is taken away. Replace it yourself."
        )
    hooks = [slot for slot, value in vars(norm).items() if slot.endswith("_hooks") and value]
    if hooks:
        raise PlanError(
            f"Expected a BatchNorm without hooks, got {came} with {hooks}. They may look at running "
            "statistics: remove them, convert, and put those back that still make sense."
        )


def _group_norm(norm: BatchNorm, groups: int) -> nn.GroupNorm:
    """A GroupNorm with the parameters of `norm`: the objects, not copies."""
    channels = norm.num_features
    most = max(1, min(groups, channels // _LEAST_CHANNELS[type(norm)]))
    divisor = next(count for count in range(most, 0, -1) if channels % count == 0)
    new = nn.GroupNorm(divisor, channels, eps=norm.eps, affine=False)
    new.affine, new.training = norm.affine, norm.training
    new.weight, new.bias = norm.weight, norm.bias
    return new
