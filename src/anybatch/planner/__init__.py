"""The fastest plan within a budget of bytes, or why there is none."""

from anybatch.planner.cache import Budget, answer, enforced
from anybatch.planner.candidates import Question
from anybatch.planner.report import PlanReport, single_rows
from anybatch.planner.trace import CUDA_GRANULE, device_of, quiet, roots_of, run_on_fakes

__all__ = [
    "CUDA_GRANULE",
    "Budget",
    "PlanReport",
    "Question",
    "answer",
    "device_of",
    "enforced",
    "quiet",
    "roots_of",
    "run_on_fakes",
    "single_rows",
]
