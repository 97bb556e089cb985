"""Budgets of bytes: a step cut by memory that was read, and plans of steps that were traced."""

from anybatch.planner.budget import (
    Budget as Budget,
    find_plan as find_plan,
    limit_of as limit_of,
    refuse_lazy as refuse_lazy,
)
from anybatch.planner.ladder import Ladder as Ladder, refuse_unread as refuse_unread
from anybatch.planner.report import PlanReport as PlanReport
from anybatch.planner.request import Request as Request
from anybatch.planner.rung import (
    MemoryReader as MemoryReader,
    Rung as Rung,
    Want as Want,
    length_of as length_of,
)
