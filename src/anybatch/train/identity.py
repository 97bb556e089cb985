"""The settings that identify a run; a checkpoint of another run is refused."""

import json
from collections.abc import Mapping
from typing import Any

from anybatch.core import CheckpointError, PlanError
from anybatch.losses import function_of
from anybatch.parallel import checkpoint
from anybatch.train.loader import Stream


def identity(trainer: Any) -> dict[str, Any]:
    """Return the settings that determine the result, except the cut; a resumed run must have the same."""
    loss = function_of(trainer.step.loss)
    loss = getattr(loss, "func", loss)  # of a partial
    return {
        **{f"config {name}": value for name, value in trainer.config.items()},
        "rows": trainer.train.count,
        "batch_size": trainer.batch_size,
        "batches": trainer.train.per_epoch(None) if isinstance(trainer.train, Stream) else None,
        "seed": trainer.seed,
        "schedulers": len(trainer.step.schedulers),
        "loss": getattr(loss, "__qualname__", type(loss).__name__),
        "precision": str(trainer.step.precision),
        "non_finite": trainer.step.planning.settings.non_finite,
    }


def check_run(found: checkpoint.Checkpoint, now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint's run has another identity."""
    was = dict(found.progress.get("run", {}))
    changed = {name: (was.get(name), value) for name, value in now.items() if was.get(name) != value}
    if changed:
        raise CheckpointError(
            f"{found.path}: expected a run with the same rows, sizes, seed, precision and config, got "
            + ", ".join(f"{name} {old} there and {new} here" for name, (old, new) in changed.items())
            + ". Start it with the same values, or start a new run."
        )


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config; raise PlanError if JSON cannot represent it."""
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"Expected config to hold JSON values, got another: {error}. Make it strings and numbers."
        ) from None
    return dict(config)
