"""What a step means: errors, units, nested tensors, batches, totals and reports."""

from anybatch.core import torch_private, tree
from anybatch.core.batch import Batch, Collate, Cut, Micro, OpenBatch, SampleBatch, TensorBatch, cut_sizes
from anybatch.core.errors import (
    AnybatchError,
    BatchError,
    BlockError,
    BudgetError,
    CheckpointError,
    DataError,
    LossError,
    NonFiniteLossError,
    OptimizerError,
    OutOfMemoryError,
    PlanError,
    ReadOnlyError,
    TraceError,
    WindowError,
)
from anybatch.core.finite import Look, NonFinite, all_finite
from anybatch.core.oom import free_caches, ran_out_of_memory, released
from anybatch.core.phase import is_moving, is_recomputing, moving, recomputing
from anybatch.core.report import Event, Listener, MicroBatchDone, MicroBatchRedone, StepReport
from anybatch.core.total import SHORT_DTYPES, Fold, Number, Total, weighted_mean
from anybatch.core.tree import mould, parts, tensors_in
from anybatch.core.units import counted, format_bytes, format_count, format_seconds, html_table, parse_bytes

__all__ = [
    "SHORT_DTYPES",
    "AnybatchError",
    "Batch",
    "BatchError",
    "BlockError",
    "BudgetError",
    "CheckpointError",
    "Collate",
    "Cut",
    "DataError",
    "Event",
    "Fold",
    "Listener",
    "Look",
    "LossError",
    "Micro",
    "MicroBatchDone",
    "MicroBatchRedone",
    "NonFinite",
    "NonFiniteLossError",
    "Number",
    "OpenBatch",
    "OptimizerError",
    "OutOfMemoryError",
    "PlanError",
    "ReadOnlyError",
    "SampleBatch",
    "StepReport",
    "TensorBatch",
    "Total",
    "TraceError",
    "WindowError",
    "all_finite",
    "counted",
    "cut_sizes",
    "format_bytes",
    "format_count",
    "format_seconds",
    "free_caches",
    "html_table",
    "is_moving",
    "is_recomputing",
    "mould",
    "moving",
    "parse_bytes",
    "parts",
    "ran_out_of_memory",
    "recomputing",
    "released",
    "tensors_in",
    "torch_private",
    "tree",
    "weighted_mean",
]
