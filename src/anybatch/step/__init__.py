"""The front door: Step, Window and what they decide about each batch."""

from anybatch.step import dry_run, foresee
from anybatch.step.foresee import plan
from anybatch.step.step import Step
from anybatch.step.window import Window

__all__ = ["Step", "Window", "dry_run", "foresee", "plan"]
