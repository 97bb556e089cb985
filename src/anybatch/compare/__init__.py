"""The one comparison of splits: outcomes of a few rows, tolerances, and the look before the first cut."""

from anybatch.compare.choose_rows import (
    choose_rows as choose_rows,
    few_of as few_of,
    joined as joined,
    numbered_anew as numbered_anew,
    whole_of as whole_of,
)
from anybatch.compare.covers import Covers as Covers, Doubt as Doubt
from anybatch.compare.look import (
    bench as bench,
    read_rows as read_rows,
    refuse_what_depends_on_the_cut as refuse_what_depends_on_the_cut,
    rehearse as rehearse,
    run_parts as run_parts,
)
from anybatch.compare.outcome import Outcome as Outcome, WatchedBatch as WatchedBatch, distance as distance
from anybatch.compare.tolerance import (
    limit_of as limit_of,
    relative_error as relative_error,
    tolerance as tolerance,
)
from anybatch.compare.witness import Witness as Witness
