"""The exception tree, drawn: every error says what was expected, what came and what to do.

    AnybatchError
    ├── BatchError        the batch cannot be cut, or is not where the model is
    ├── LossError         the loss cannot be summed: no weight, not a scalar, unknown reduction
    │   └── NonFiniteLossError   the loss of some micro-batch is NaN or infinite
    ├── PlanError         a choice that cannot be carried out: micro-batch size, clipping, dtype
    │   ├── BudgetError          no plan fits the memory budget
    │   ├── TraceError           a step cannot be run on fake tensors, or its bytes follow no law
    │   └── BlockError           a block of the model does not run again as it did
    ├── OptimizerError    optimizers, schedulers and parameters do not belong together
    ├── OutOfMemoryError  not even one row fits, or the update does not
    ├── RankError         another rank failed, ended or did not answer
    ├── WindowError       a window used out of order: left open, closed empty, used after its end
    ├── ReadOnlyError     an attribute was assigned that is only to be read
    ├── DataError         a data file is missing, truncated, corrupt or of another format
    └── CheckpointError   a checkpoint is missing, truncated, corrupt or of another model

All but four are also `ValueError`: `OutOfMemoryError` is a `MemoryError`, `RankError` and `WindowError` are
a `RuntimeError`, `ReadOnlyError` an `AttributeError`. When a step raises one, the model, its buffers, the
optimizer and the random state are as they were before it, unless the error says that an update was torn.
"""


class AnybatchError(Exception):
    """Root of everything anybatch raises on purpose."""


class BatchError(AnybatchError, ValueError):
    """The batch cannot be cut, or is not where the model is."""


class LossError(AnybatchError, ValueError):
    """The loss cannot be summed: no weight, not a scalar, an unknown reduction."""


class NonFiniteLossError(LossError):
    """The loss of some micro-batch is NaN or infinite; no update was made.

    Attributes:
        reached: where random streams had come to, if they were put back since: who skips goes on there.
    """

    reached: "dict[str, object] | None" = None


class PlanError(AnybatchError, ValueError):
    """A choice that cannot be carried out: micro-batch size, clipping, dtype."""


class BlockError(PlanError):
    """A block of the model does not run again as it did, so it cannot be recomputed.

    Attributes:
        block: name of the block.
    """

    def __init__(self, message: str, *, block: str = "") -> None:
        super().__init__(message)
        self.block = block


class TraceError(PlanError):
    """A step cannot be run on fake tensors, or its bytes follow no law."""


class BudgetError(PlanError):
    """No plan fits the memory budget.

    Attributes:
        smallest: the smallest budget that would do, in bytes; about that, where the message says so.
        ledger: where the bytes of that plan go (`anybatch.memory.ledger.Ledger`); None where it is not known.
    """

    def __init__(self, message: str, *, smallest: int = 0, ledger: object = None) -> None:
        super().__init__(message)
        self.smallest = smallest
        self.ledger = ledger


class OptimizerError(AnybatchError, ValueError):
    """Optimizers, schedulers and parameters do not belong together."""


class OutOfMemoryError(AnybatchError, MemoryError):
    """Memory ran out, and nothing that keeps the result was left to try.

    Attributes:
        ledger: the bytes of the step by owner, or whatever tells where they are; None where nobody knows.
    """

    def __init__(self, message: str, ledger: object = None) -> None:
        super().__init__(message)
        self.ledger = ledger

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.ledger is None else f"{message}\n{self.ledger}"


class RankError(AnybatchError, RuntimeError):
    """Another rank failed, ended or did not answer. No update was made here; all is as before the step."""


class WindowError(AnybatchError, RuntimeError):
    """A window was used out of order: left open, closed empty, or used after its end."""


class ReadOnlyError(AnybatchError, AttributeError):
    """An attribute was assigned that is only to be read."""


class DataError(AnybatchError, ValueError):
    """A data file is missing, truncated, corrupt or of another format."""


class CheckpointError(AnybatchError, ValueError):
    """A checkpoint is missing, truncated, corrupt or of another model."""


def check_whole(name: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number of at least so much (PlanError)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}. Pass an int."
        )
