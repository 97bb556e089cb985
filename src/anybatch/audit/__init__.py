"""The audit of a step: a few rows and all rows by other cuts, when they are due, and what is known since"""

from anybatch.audit.all_rows import AllRows as AllRows
from anybatch.audit.audit import NOTHING as NOTHING, Audit as Audit, Check as Check
from anybatch.audit.few_rows import rehearse as rehearse, run_parts as run_parts
from anybatch.audit.known import Known as Known
