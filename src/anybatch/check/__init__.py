"""The self-test: split equals whole on your own model, or the place where it breaks."""

from anybatch.check.check import CheckReport, check, refuse_without_data
from anybatch.check.tolerance import relative_error, tolerance

__all__ = ["CheckReport", "check", "refuse_without_data", "relative_error", "tolerance"]
