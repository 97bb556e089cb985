"""Foundations: errors, units, nested tensors, batches, totals and reports."""

from anybatch.core import (
    accelerator as accelerator,
    errors as errors,
    torch_private as torch_private,
    tree as tree,
)
from anybatch.core.batch import (
    Batch as Batch,
    Collate as Collate,
    Cut as Cut,
    Micro as Micro,
    NoRows as NoRows,
    OpenBatch as OpenBatch,
    Padding as Padding,
    SampleBatch as SampleBatch,
    TensorBatch as TensorBatch,
    TrimmedBatch as TrimmedBatch,
    copied as copied,
    cut_sizes as cut_sizes,
)
from anybatch.core.callback import (
    Callback as Callback,
    CallbackLike as CallbackLike,
    Callbacks as Callbacks,
    Functions as Functions,
    bound as bound,
    call as call,
    check_callbacks as check_callbacks,
    takes as takes,
)
from anybatch.core.columns import ColumnBatch as ColumnBatch, batch_of as batch_of
from anybatch.core.errors import (
    AnybatchError as AnybatchError,
    BatchError as BatchError,
    BlockError as BlockError,
    BudgetError as BudgetError,
    CheckpointError as CheckpointError,
    DataError as DataError,
    KeywordError as KeywordError,
    LossError as LossError,
    NonFiniteLossError as NonFiniteLossError,
    OptimizerError as OptimizerError,
    OutOfMemoryError as OutOfMemoryError,
    PlanError as PlanError,
    RankError as RankError,
    ReadOnlyError as ReadOnlyError,
    TraceError as TraceError,
    WindowError as WindowError,
    check_whole as check_whole,
)
from anybatch.core.finite import Look as Look, NonFinite as NonFinite, all_finite as all_finite
from anybatch.core.loaded import loaded as loaded
from anybatch.core.oom import (
    free_caches as free_caches,
    has_written as has_written,
    is_final as is_final,
    mark_written as mark_written,
    note as note,
    note_update as note_update,
    ran_out_of_memory as ran_out_of_memory,
    released as released,
)
from anybatch.core.phase import (
    is_moving as is_moving,
    is_recomputing as is_recomputing,
    moving as moving,
    recomputing as recomputing,
    running as running,
)
from anybatch.core.report import (
    EpochReport as EpochReport,
    MicroBatchDone as MicroBatchDone,
    MicroBatchRedone as MicroBatchRedone,
    RunInfo as RunInfo,
    StepReport as StepReport,
)
from anybatch.core.torch_private import local as local
from anybatch.core.total import (
    SHORT_DTYPES as SHORT_DTYPES,
    Fold as Fold,
    Number as Number,
    Total as Total,
    weighted_mean as weighted_mean,
)
from anybatch.core.tree import (
    is_mapping as is_mapping,
    is_sequence as is_sequence,
    is_shard as is_shard,
    mould as mould,
    parts as parts,
    tensors_in as tensors_in,
    whole as whole,
)
from anybatch.core.units import (
    counted as counted,
    format_bytes as format_bytes,
    format_count as format_count,
    format_seconds as format_seconds,
    html_table as html_table,
    kind_of as kind_of,
    parse_bytes as parse_bytes,
)
