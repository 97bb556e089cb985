"""Train with any batch size, any model, in the memory you have, and the same result."""

from anybatch.errors import AnybatchError
from anybatch.events import StepReport
from anybatch.fold import Fold, weighted_mean
from anybatch.losses.terms import Terms
from anybatch.plan import Plan
from anybatch.step import Step, Window
from anybatch.total import Total
from anybatch.train.metrics import accuracy
from anybatch.train.trainer import Trainer

__all__ = [
    "AnybatchError",
    "Fold",
    "Plan",
    "Step",
    "StepReport",
    "Terms",
    "Total",
    "Trainer",
    "Window",
    "accuracy",
    "weighted_mean",
]
