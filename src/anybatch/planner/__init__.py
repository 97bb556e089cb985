"""The fastest plan within a budget of bytes, or why there is none."""

from anybatch.planner.cache import Budget, enforced, find_plan
from anybatch.planner.candidates import Request
from anybatch.planner.measure import reached_by
from anybatch.planner.report import PlanReport, single_rows
from anybatch.planner.trace import CUDA_GRANULE, device_of, quiet, roots_of, run_on_fakes

__all__ = [
    "CUDA_GRANULE",
    "Budget",
    "PlanReport",
    "Request",
    "device_of",
    "enforced",
    "find_plan",
    "quiet",
    "reached_by",
    "roots_of",
    "run_on_fakes",
    "single_rows",
]
