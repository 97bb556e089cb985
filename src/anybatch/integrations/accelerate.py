"""Special cases for accelerate: prepared optimizers and schedulers, and the precision of prepared models."""

from typing import Any

from anybatch.core import OptimizerError, loaded


def unprepared(part: Any) -> Any:
    """Return the optimizer or scheduler that accelerate has wrapped; any other object unchanged.

    Raises:
        OptimizerError: the scheduler steps once per rank in each update.
    """
    name = {"accelerate.optimizer": "optimizer", "accelerate.scheduler": "scheduler"}.get(
        type(part).__module__
    )
    if name == "scheduler" and part.step_with_optimizer and not part.split_batches:
        count: int = loaded("accelerate.state").AcceleratorState().num_processes
        if count > 1:
            raise OptimizerError(
                f"Expected a scheduler that steps once per update, got one that accelerate steps {count} "
                "times, once per rank. Pass one that was not prepared, or use ab.BatchLoss and step yours."
            )
    return part if name is None else getattr(part, name)


def computes_in_float16(model: Any) -> bool:
    """Return True if accelerate has put float16 autocast into the forward of a model."""
    state = loaded("accelerate.state")
    if state is None or not any(hasattr(one, "_original_forward") for one in model.modules()):
        return False
    known = state.AcceleratorState
    return bool(known._shared_state) and known().mixed_precision == "fp16"  # pyright: ignore[reportPrivateUsage]
