"""The front door: Step, Window and what they decide about each batch."""

from anybatch.engine import Window
from anybatch.step import dry_run, foresee
from anybatch.step.batch_loss import BatchLoss
from anybatch.step.choose_rows import choose_rows
from anybatch.step.foresee import plan
from anybatch.step.length import ByLength
from anybatch.step.outcome import Outcome, distance
from anybatch.step.step import Step
from anybatch.step.tolerance import limit_of, relative_error, tolerance

__all__ = [
    "BatchLoss",
    "ByLength",
    "Outcome",
    "Step",
    "Window",
    "choose_rows",
    "distance",
    "dry_run",
    "foresee",
    "limit_of",
    "plan",
    "relative_error",
    "tolerance",
]
