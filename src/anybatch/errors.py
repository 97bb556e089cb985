"""The exception tree, drawn: every error says what was expected, what came and what to do.

    AnybatchError
    ├── BatchError        the batch cannot be cut, or is not where the model is
    ├── LossError         the loss cannot be summed: no weight, not a scalar, unknown reduction
    │   └── NonFiniteLossError   the loss of some micro-batch is NaN or infinite
    ├── PlanError         a choice that cannot be carried out: micro-batch size, clipping, dtype
    ├── OptimizerError    optimizers, schedulers and parameters do not belong together
    ├── WindowError       a window used out of order: left open, closed empty, used after its end
    ├── DataError         a data file is missing, truncated, corrupt or of another format
    └── CheckpointError   a checkpoint is missing, truncated, corrupt or of another model

All but `WindowError` are also `ValueError`; `WindowError` is a `RuntimeError`. When one of them is raised
from a step, the model, its buffers, the optimizer and the random state are as they were before that step.
"""


class AnybatchError(Exception):
    """Root of everything anybatch raises on purpose."""


class BatchError(AnybatchError, ValueError):
    """The batch cannot be cut, or is not where the model is."""


class LossError(AnybatchError, ValueError):
    """The loss cannot be summed: no weight, not a scalar, an unknown reduction."""


class NonFiniteLossError(LossError):
    """The loss of some micro-batch is NaN or infinite; no update was made."""


class PlanError(AnybatchError, ValueError):
    """A choice that cannot be carried out: micro-batch size, clipping, dtype."""


class OptimizerError(AnybatchError, ValueError):
    """Optimizers, schedulers and parameters do not belong together."""


class WindowError(AnybatchError, RuntimeError):
    """A window was used out of order: left open, closed empty, or used after its end."""


class DataError(AnybatchError, ValueError):
    """A data file is missing, truncated, corrupt or of another format."""


class CheckpointError(AnybatchError, ValueError):
    """A checkpoint is missing, truncated, corrupt or of another model."""
