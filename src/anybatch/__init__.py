"""Train with any batch size, any model, in the memory you have, and the same result."""

from anybatch.check import CheckReport, check
from anybatch.errors import AnybatchError, BudgetError
from anybatch.events import StepReport
from anybatch.fold import Fold, weighted_mean
from anybatch.foresee import plan
from anybatch.losses.linear import linear_cross_entropy
from anybatch.losses.model_loss import ModelLoss
from anybatch.losses.terms import Terms
from anybatch.losses.whole_batch import WholeBatch
from anybatch.meetings import batch_norm_to_group_norm
from anybatch.options import PlanReport
from anybatch.plan import Plan
from anybatch.precision import Precision
from anybatch.step import Step
from anybatch.total import Total
from anybatch.train.metrics import accuracy
from anybatch.train.trainer import Trainer
from anybatch.window import Window

__all__ = [
    "AnybatchError",
    "BudgetError",
    "CheckReport",
    "Fold",
    "ModelLoss",
    "Plan",
    "PlanReport",
    "Precision",
    "Step",
    "StepReport",
    "Terms",
    "Total",
    "Trainer",
    "WholeBatch",
    "Window",
    "accuracy",
    "batch_norm_to_group_norm",
    "check",
    "linear_cross_entropy",
    "plan",
    "weighted_mean",
]
