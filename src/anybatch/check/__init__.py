"""The self-test: compare splits with the whole batch on your model, and name the cause of a difference"""

from anybatch.check.check import (
    CheckReport as CheckReport,
    check as check,
    refuse_without_data as refuse_without_data,
)
from anybatch.check.passes import Recorder as Recorder
from anybatch.check.subject import named_parameters as named_parameters
from anybatch.trial import relative_error as relative_error, tolerance as tolerance
