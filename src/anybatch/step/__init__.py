"""The front door: Step, Window and what they decide about each batch."""

from anybatch.step import dry_run as dry_run, foresee as foresee
from anybatch.step.batch_loss import BatchLoss as BatchLoss
from anybatch.step.choose_rows import choose_rows as choose_rows
from anybatch.step.foresee import plan as plan
from anybatch.step.length import ByLength as ByLength
from anybatch.step.outcome import Outcome as Outcome, distance as distance
from anybatch.step.step import Step as Step
from anybatch.step.tolerance import (
    limit_of as limit_of,
    relative_error as relative_error,
    tolerance as tolerance,
)
from anybatch.step.window import Window as Window
