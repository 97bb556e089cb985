"""Train with any batch size, any model, in the memory you have, and the same result."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.batchnorm import batch_norm_to_group_norm
    from anybatch.check import CheckReport, check
    from anybatch.core import AnybatchError, BudgetError, Callback, StepReport, Total, errors
    from anybatch.losses import Additive, ModelLoss, PerRow, Terms, WholeBatch, linear_cross_entropy
    from anybatch.observe import GradientFlow, gradient_flow
    from anybatch.parallel import ParameterServer
    from anybatch.planner import PlanReport
    from anybatch.precision import Precision
    from anybatch.step import EMA, BatchLoss, Options, Step, Window, plan
    from anybatch.train import EarlyStopping, Metrics, Trainer, accuracy

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


# The package of each name, imported when the name is first used: `anybatch --help` needs no torch.
_HOMES = {
    "batchnorm": "batch_norm_to_group_norm",
    "check": "CheckReport check",
    "core": "AnybatchError BudgetError Callback StepReport Total errors",
    "losses": "Additive ModelLoss PerRow Terms WholeBatch linear_cross_entropy",
    "observe": "GradientFlow gradient_flow",
    "parallel": "ParameterServer",
    "planner": "PlanReport",
    "precision": "Precision",
    "step": "EMA BatchLoss Options Step Window plan",
    "train": "EarlyStopping Metrics Trainer accuracy",
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in (home, *names.split()):
            package = importlib.import_module(f"anybatch.{home}")
            globals()[name] = found = getattr(package, name) if name in names.split() else package
            return found
    missing = f"module 'anybatch' has no attribute {name!r}"
    raise AttributeError(missing, name=name, obj=sys.modules[__name__])  # Python adds the nearest name


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        if (name, type(value)) != ("check", ModuleType):  # `ab.check` is the function, not its package
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
