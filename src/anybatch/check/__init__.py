"""The self-test: compare splits with the whole batch on your model, and name the cause of a difference"""

from anybatch.check.check import CheckReport, check, refuse_without_data
from anybatch.check.copies import named_parameters
from anybatch.check.passes import Recorder
from anybatch.step import relative_error, tolerance

__all__ = [
    "CheckReport",
    "Recorder",
    "check",
    "named_parameters",
    "refuse_without_data",
    "relative_error",
    "tolerance",
]
