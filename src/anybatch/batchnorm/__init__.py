"""BatchNorm: found, refused, frozen, or converted to GroupNorm."""

from anybatch.batchnorm.group_norm import batch_norm_to_group_norm as batch_norm_to_group_norm
from anybatch.batchnorm.modes import (
    BATCH_NORM_CHOICES as BATCH_NORM_CHOICES,
    BatchNorm as BatchNorm,
    BatchNormChoice as BatchNormChoice,
    check_batch_norm as check_batch_norm,
    find_batch_norms as find_batch_norms,
    frozen_batch_norms as frozen_batch_norms,
    listed as listed,
    names_of_batch_norms as names_of_batch_norms,
    refuse_batch_norms as refuse_batch_norms,
    warn_of_untrained as warn_of_untrained,
)
