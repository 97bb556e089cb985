"""The fastest plan within a budget of bytes, or why there is none."""

from anybatch.planner.cache import Budget, enforced, find_plan
from anybatch.planner.candidates import Request
from anybatch.planner.report import PlanReport, single_rows

__all__ = [
    "Budget",
    "PlanReport",
    "Request",
    "enforced",
    "find_plan",
    "single_rows",
]
