"""The self-test: compare splits with the whole batch on your model, and name the cause of a difference"""

from anybatch.check.bench import named_parameters as named_parameters
from anybatch.check.check import CheckReport as CheckReport, check as check
from anybatch.check.passes import Recorder as Recorder
from anybatch.check.prepare import refuse_without_data as refuse_without_data
from anybatch.trial import relative_error as relative_error, tolerance as tolerance
