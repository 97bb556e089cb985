"""Precisions: dtypes, the loss scale, float32 master weights, casts."""

from anybatch.precision.apply import Working, at_work
from anybatch.precision.loss_scale import FIRST_SCALE, LossScale
from anybatch.precision.master_weights import Masters
from anybatch.precision.policy import (
    NAMED,
    NON_FINITE_POLICIES,
    NonFinitePolicy,
    Precision,
    PrecisionName,
    check_non_finite,
    find_precision,
)

__all__ = [
    "FIRST_SCALE",
    "NAMED",
    "NON_FINITE_POLICIES",
    "LossScale",
    "Masters",
    "NonFinitePolicy",
    "Precision",
    "PrecisionName",
    "Working",
    "at_work",
    "check_non_finite",
    "find_precision",
]
