"""Precisions: dtypes, the loss scale, float32 master weights, casts."""

from anybatch.precision.apply import Working as Working, at_work as at_work
from anybatch.precision.loss_scale import FIRST_SCALE as FIRST_SCALE, LossScale as LossScale
from anybatch.precision.master_weights import Masters as Masters
from anybatch.precision.policy import (
    NAMED as NAMED,
    NON_FINITE_POLICIES as NON_FINITE_POLICIES,
    NonFinitePolicy as NonFinitePolicy,
    Precision as Precision,
    PrecisionName as PrecisionName,
    check_non_finite as check_non_finite,
    find_precision as find_precision,
)
