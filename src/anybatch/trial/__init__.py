"""Trials: rows run aside and leave no trace; their outcomes, and how far these may lie apart"""

from anybatch.trial.bench import (
    PLAIN as PLAIN,
    Bench as Bench,
    Place as Place,
    bench as bench,
    places_of as places_of,
    plain as plain,
)
from anybatch.trial.outcome import (
    Difference as Difference,
    Looked as Looked,
    Outcome as Outcome,
    Split as Split,
    WatchedBatch as WatchedBatch,
    differ as differ,
    distance as distance,
    losses_differ as losses_differ,
    outcome_of as outcome_of,
)
from anybatch.trial.replay import (
    Axis as Axis,
    Replayed as Replayed,
    RowPart as RowPart,
    find_axis as find_axis,
    select as select,
    take as take,
)
from anybatch.trial.rows import (
    ROWS as ROWS,
    choose_rows as choose_rows,
    numbered_anew as numbered_anew,
    whole_of as whole_of,
)
from anybatch.trial.tolerance import (
    limit_of as limit_of,
    relative_error as relative_error,
    tolerance as tolerance,
)
