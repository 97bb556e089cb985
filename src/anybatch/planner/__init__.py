"""The fastest plan within a budget of bytes, or why there is none."""

from anybatch.planner.cache import Budget as Budget, enforced as enforced, find_plan as find_plan
from anybatch.planner.measured import Measured as Measured, length_of as length_of, may_be_read as may_be_read
from anybatch.planner.report import PlanReport as PlanReport, single_rows as single_rows
from anybatch.planner.request import Request as Request
