"""The fastest plan within a budget of bytes, or why there is none."""

from anybatch.planner.cache import Budget, enforced, find_plan
from anybatch.planner.candidates import Request
from anybatch.planner.measured import Measured, length_of, may_be_read
from anybatch.planner.report import PlanReport, single_rows

__all__ = [
    "Budget",
    "Measured",
    "PlanReport",
    "Request",
    "enforced",
    "find_plan",
    "length_of",
    "may_be_read",
    "single_rows",
]
