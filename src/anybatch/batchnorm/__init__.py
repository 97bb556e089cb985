"""BatchNorm: found, refused, frozen, or converted to GroupNorm."""

from anybatch.batchnorm.group_norm import batch_norm_to_group_norm
from anybatch.batchnorm.modes import (
    BATCH_NORM_CHOICES,
    BatchNorm,
    BatchNormChoice,
    check_batch_norm,
    find_batch_norms,
    frozen_batch_norms,
    names_of_batch_norms,
    refuse_batch_norms,
    warn_of_untrained,
)

__all__ = [
    "BATCH_NORM_CHOICES",
    "BatchNorm",
    "BatchNormChoice",
    "batch_norm_to_group_norm",
    "check_batch_norm",
    "find_batch_norms",
    "frozen_batch_norms",
    "names_of_batch_norms",
    "refuse_batch_norms",
    "warn_of_untrained",
]
