"""Train with any batch size, any model, in the memory you have, and the same result."""

from anybatch.batchnorm import batch_norm_to_group_norm
from anybatch.check import CheckReport, check
from anybatch.core import AnybatchError, BudgetError, Callback, StepReport, Total, errors
from anybatch.losses import Additive, ModelLoss, PerRow, Terms, WholeBatch, linear_cross_entropy
from anybatch.observe import GradientFlow, gradient_flow
from anybatch.parallel import ParameterServer
from anybatch.planner import PlanReport
from anybatch.precision import Precision
from anybatch.step import BatchLoss, Options, Step, Window, plan
from anybatch.train import EMA, EarlyStopping, LossMonitor, Metrics, Trainer, accuracy

__version__ = "0.2.0"

__all__ = [
    "EMA",
    "Additive",
    "AnybatchError",
    "BatchLoss",
    "BudgetError",
    "Callback",
    "CheckReport",
    "EarlyStopping",
    "GradientFlow",
    "LossMonitor",
    "Metrics",
    "ModelLoss",
    "Options",
    "ParameterServer",
    "PerRow",
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
    "errors",
    "gradient_flow",
    "linear_cross_entropy",
    "plan",
]


def __dir__() -> list[str]:
    return __all__
