"""The exception tree: every error says what was expected, what came and what to do.

All but four are also `ValueError`: `OutOfMemoryError` is a `MemoryError`, `RankError` and `WindowError` are
a `RuntimeError`, `ReadOnlyError` an `AttributeError`. When a step raises one, the model, its buffers, the
optimizer and the random state are as they were before it, unless the error says that an update was torn.
"""


class AnybatchError(Exception):
    """Base class of all errors of anybatch.

    Example:
        >>> try:
        ...     check_whole("epochs", 0, least=1)
        ... except AnybatchError as error:
        ...     print(error)
        Expected epochs to be a whole number of at least 1, got 0. Pass an int.
    """


class BatchError(AnybatchError, ValueError):
    """The batch cannot be cut, or is on another device than the model."""


class LossError(AnybatchError, ValueError):
    """The loss cannot be summed: no weight, not a scalar, an unknown reduction."""


class NonFiniteLossError(LossError):
    """The loss of some micro-batch is NaN or infinite; no update was made."""

    # The random state at the failure, if it was put back since; a skipped step continues from it.
    reached: "dict[str, object] | None" = None


class PlanError(AnybatchError, ValueError):
    """A setting cannot be carried out: micro-batch size, clipping, dtype."""


class BlockError(PlanError):
    """A block of the model does not repeat its forward, so it cannot be recomputed."""

    def __init__(self, message: str, *, block: str = "") -> None:
        super().__init__(message)
        self.block = block  # its name


class KeywordError(PlanError, TypeError):
    """A parameter has another name or place, which the message says; also a `TypeError`."""


class TraceError(PlanError):
    """A step cannot be run on fake tensors, or its bytes follow no law."""


class BudgetError(PlanError):
    """No plan fits the memory budget.

    Attributes:
        smallest: the smallest sufficient budget in bytes; a lower bound if the message says so.

    Example:
        >>> import anybatch as ab, torch
        >>> model, batch = torch.nn.Linear(64, 64), (torch.randn(8, 64), torch.randn(8, 64))
        >>> try:
        ...     ab.plan(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters()), batch, memory="1KiB")
        ... except BudgetError as error:
        ...     print(error.smallest > 64 * 64 * 4)
        True
    """

    def __init__(self, message: str, *, smallest: int = 0) -> None:
        super().__init__(message)
        self.smallest = smallest


class OptimizerError(AnybatchError, ValueError):
    """Optimizers, schedulers and parameters do not belong together."""


class OutOfMemoryError(AnybatchError, MemoryError):
    """Memory ran out, and no exact way to use less was left."""


class RankError(AnybatchError, RuntimeError):
    """Another rank failed, ended or did not answer. No update was made; the state is as before the step."""


class WindowError(AnybatchError, RuntimeError):
    """A window was used out of order: left open, closed empty, or used after its end."""


class ReadOnlyError(AnybatchError, AttributeError):
    """A read-only attribute was assigned."""


class DataError(AnybatchError, ValueError):
    """A data file is missing, truncated, corrupt or of another format."""


class CheckpointError(AnybatchError, ValueError):
    """A checkpoint is missing, truncated, corrupt or of another model."""


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise PlanError unless `value` is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}. Pass an int."
        )
