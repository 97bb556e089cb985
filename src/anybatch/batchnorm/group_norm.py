"""Conversion of BatchNorm to GroupNorm, which treats each row alone, with the same parameters."""

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.batchnorm.modes import BatchNorm
from anybatch.core import PlanError

# In images each channel has many values, and a group has at least two channels: one would be InstanceNorm,
# the worst in the paper. In vectors each channel has one value, so a group has at least 16 channels, the
# paper's other setting (table 3).
_LEAST_CHANNELS: dict[type[BatchNorm], int] = {
    nn.BatchNorm1d: 16,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 2,
    nn.SyncBatchNorm: 16,
}


def batch_norm_to_group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm by a GroupNorm, which treats each row alone, so that every cut is exact.

    The model is changed in place, as by `torch.nn.SyncBatchNorm.convert_sync_batchnorm`. Each GroupNorm has
    the parameter objects of its BatchNorm, so an earlier optimizer stays valid; eps and the training flag are
    kept, running statistics are dropped, also from the state dict. The function of the input changes: convert
    before training, or fine-tune after.

    The number of groups is the largest divisor of the channels that is at most `groups` and leaves at least 2
    channels per group; at least 16 in `BatchNorm1d` and `SyncBatchNorm`, whose input may be vectors. With
    fewer channels there is one group.

    Args:
        model: the model, changed in place.
        groups: largest number of groups of a GroupNorm.

    Returns:
        The model; the new module if the model is itself a BatchNorm.

    Raises:
        PlanError: groups is less than 1, or a BatchNorm cannot be replaced: it is lazy and has not seen a
            batch, is of a subclass (which may do more than normalize), or has hooks. The model is unchanged.

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
    places = dict(model.named_modules(remove_duplicate=False))  # with all names of a shared module
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
    hooks = [slot for slot, value in vars(norm).items() if value and slot.endswith(("_hooks", "forward"))]
    if hooks:
        raise PlanError(
            f"Expected a BatchNorm without hooks, got {came} with {hooks}. They may look at running "
            "statistics: remove them, convert, and put those back that still make sense."
        )


def _group_norm(norm: BatchNorm, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    most = max(1, min(groups, channels // _LEAST_CHANNELS[type(norm)]))
    divisor = next(count for count in range(most, 0, -1) if channels % count == 0)
    new = nn.GroupNorm(divisor, channels, eps=norm.eps, affine=False)
    new.affine, new.training = norm.affine, norm.training
    new.weight, new.bias = norm.weight, norm.bias
    return new
