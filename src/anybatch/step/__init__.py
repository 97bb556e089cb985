"""The front door: Step, Window and what they decide about each batch."""

from anybatch.step import dry_run as dry_run, foresee as foresee
from anybatch.step.batch_loss import BatchLoss as BatchLoss
from anybatch.step.ema import EMA as EMA
from anybatch.step.foresee import plan as plan
from anybatch.step.length import ByLength as ByLength
from anybatch.step.options import DEFAULT as DEFAULT, Options as Options, known_keywords as known_keywords
from anybatch.step.step import Step as Step
from anybatch.step.window import OpenWindow as OpenWindow

Window = OpenWindow
