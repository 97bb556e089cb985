"""The state of a step beside that of its parts, for `torch.save`"""

from collections.abc import Mapping
from typing import Any

from anybatch.core import CheckpointError
from anybatch.state import rng
from anybatch.step.window import refuse_open


def state_of(step: Any) -> dict[str, Any]:
    """Return what model, loss, optimizers, schedulers and callbacks do not hold, for `torch.save`.

    That is the loss scale, the float32 copies of 16-bit weights, the sizes that did not fit, the readings
    of a budget, the number of updates, what was compared, and the random streams of the process. A window
    must not be open.
    """
    refuse_open(step)
    budget = step.planning.budget
    full = [{name: step.masters.of(p) for name, p in one.named_parameters()} for one in _modules(step)]
    return {
        "scale": step.scale.state(),
        "masters": [{name: one for name, one in each.items() if one is not None} for each in full],
        "limits": step.planning.limits.state(),
        "plans": [] if budget is None else budget.state(),
        "updates": step.progress.updates,
        "known": {"begun": step.progress.begun, "kinds": step.known.state()},
        "random": rng.capture_process(),
    }


def load_state(step: Any, state: Mapping[str, Any]) -> None:
    """Load the result of `state_dict`, after model, optimizers and schedulers are loaded."""
    refuse_open(step)
    missing = {"scale", "masters", "limits", "plans", "updates", "random"} - state.keys()
    if missing:
        raise CheckpointError(
            f"Expected the result of step.state_dict(), got one without {sorted(missing)}: keys "
            f"{sorted(map(str, state))[:8]}. Save step.state_dict() beside those of model and optimizer."
        )
    step.scale.load(state["scale"])
    step.planning.limits.load(state["limits"])
    if step.planning.budget is not None:
        step.planning.budget.load(state["plans"])
    for module, masters in zip(_modules(step), state["masters"], strict=True):
        step.masters.load_state_dict(module, masters, strict=False)
    step.progress.updates = state["updates"]
    if known := state.get("known"):  # older states have none, and compare from the first update on
        step.progress.begun = known["begun"]
        step.known.load(known["kinds"])
    rng.restore_process(state["random"])


def _modules(step: Any) -> tuple[Any, Any]:
    return step.model, step.loss_module
