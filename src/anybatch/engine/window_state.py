"""The state of an open window: its sums as plain values, for a checkpoint, and how they are read again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import CheckpointError, WindowError
from anybatch.engine.division import Division, to_host
from anybatch.engine.gradients import Apart, Gradient, accumulation_dtype
from anybatch.engine.sums import Redone, Sums
from anybatch.losses import function_of

FORMAT = "window 3"
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


def write(sums: Sums, loss: object, *, rows: int, is_skipped: bool) -> dict[str, Any]:
    """Return all that a window needs to go on elsewhere: plain values, and copies of tensors on the CPU.

    Raises:
        WindowError: a gradient is sparse.
    """
    if sums.task.strategy.is_lockstep:
        raise WindowError(
            "Expected a window of an unsharded model to save, got one with fully_shard, whose gradient sums "
            "are shards. Close or discard the window first."
        )
    position = {parameter: index for index, parameter in enumerate(sums.task.network.parameters)}

    def plain(banks: Mapping[str, Gradient]) -> dict[str, dict[int, Tensor]]:
        if any(total.is_sparse for bank in banks.values() for total in bank.values()):
            raise WindowError(
                "Expected dense gradients in a window that is saved, got sparse ones. Close the window first."
            )
        return {
            name: {position[one]: total.detach().to("cpu", copy=True) for one, total in bank.items()}
            for name, bank in banks.items()
        }

    fold, gradients = dict[str, Any](), dict[str, Any]()
    if isinstance(sums.gradients, Apart):
        fold = sums.division.plain() | {
            "sums": [*map(to_host, sums.values)],
            "weights": [*map(to_host, sums.weights)],
            "has_flowed": sums.has_flowed,
        }
        gradients = {"banks": plain(sums.gradients.banks), "errors": plain(sums.gradients.errors)}
    return {
        "format": FORMAT,
        "made": _conditions(sums, loss),
        "rows": rows,
        "is_skipped": is_skipped,
        "cut": list(sums.rows),
        "redone": [[one.rows, one.may_be_cut] for one in sums.redone],
        "dropped": sums.dropped,
        "fold": fold,
        "gradients": gradients,
        "scale": sums.task.scale.state(),
        "scale_before": sums.scale_before,
    }


def restore(state: Mapping[str, Any], sums: Sums, loss: object) -> tuple[int, bool]:
    """Fill the sums of a window that has just begun with those of `write`, from the same step.

    Returns:
        The rows added so far, and whether the update is to be skipped.

    Raises:
        CheckpointError: the state is something else, or of a step that differs in what the sums depend on;
            nothing was changed.
    """
    try:
        if state["format"] != FORMAT:
            raise ValueError(f"a state of the format {state['format']!r}, not {FORMAT!r}")
        there, here = state["made"], _conditions(sums, loss)
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if not names:
            return _restore(state, sums)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"Expected the state of a window as Window.state() gives it, got one that cannot be read "
            f"({type(error).__name__}: {error}). Use an earlier checkpoint."
        ) from None
    raise CheckpointError(
        f"Expected the state of a window of this step, got one of another: {names[0]} is "
        f"{there.get(names[0], 'missing')} there and {here.get(names[0], 'missing')} here "
        f"({len(names)} differ). Make model, loss and step as they were, and restore first the model that "
        "was saved along with the window."
    )


def _conditions(sums: Sums, loss: object) -> dict[str, str]:
    """Return in words what the sums depend on, besides rows: settings, loss, and values of the parameters."""
    task, settings = sums.task, sums.plan
    made: dict[str, object] = {
        "precision": settings.precision,
        "non_finite": settings.non_finite,
        "accumulate": settings.accumulate,
        "compensated": settings.compensated,
        # In a window both take the statistics of each micro-batch, so that its sums are the same.
        "batch_norm": settings.batch_norm or "micro",
        "loss": _named(loss),
        "coefficients": {name: float(value) for name, value in task.loss.coefficients.items()},
    }
    names, sums_of_bits = task.names(), _bits(task.network.parameters)
    for one, bits in zip(task.network.parameters, sums_of_bits, strict=True):
        made[names[one]] = f"{one.dtype} {tuple(one.shape)} with the checksum {bits & 0xFFFFFFFF:x}"
    return {name: str(value) for name, value in made.items()}


def _named(loss: object) -> str:
    """Return the name of a loss; one of torch's with its settings, such as a reduction."""
    inner: Any = function_of(loss)
    given: Mapping[str, Any] = getattr(inner, "keywords", {})  # of a partial
    inner = getattr(inner, "func", inner)
    if isinstance(inner, nn.Module) and type(inner).__module__.startswith("torch."):
        given = {name: value for name, value in vars(inner).items() if name[0] != "_" and name != "training"}
    plain = [f"{name}={one!r}" for name, one in sorted(given.items()) if isinstance(one, int | float | str)]
    return f"{getattr(inner, '__qualname__', type(inner).__name__)}({', '.join(plain)})"


def _bits(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the sum of each parameter's bits, read as integers: the same in any order, on any device."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums: list[Tensor] = []
    for parameter in parameters:
        value = parameter.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        sums.append(value.view(whole[value.element_size()]).sum(dtype=torch.int64))
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


def _restore(state: Mapping[str, Any], sums: Sums) -> tuple[int, bool]:
    """Read all of the state first, then write."""
    task, fold, chosen = sums.task, dict(state["fold"]), sums.plan.accumulation_dtype
    found = state["gradients"] if fold else {"banks": {}, "errors": {}}
    if list(found["banks"]) != list(fold.get("coefficients", ())):
        raise ValueError(f"gradients of {list(found['banks'])}, not of {list(fold.get('coefficients', ()))}")

    def tensors(values: Mapping[int, Any]) -> Gradient:
        pairs = [(task.network.parameters[int(position)], value) for position, value in values.items()]
        return {p: _tensor(value, p, accumulation_dtype(p.dtype, chosen)) for p, value in pairs}

    banks, errors = (
        {name: tensors(values) for name, values in found[kind].items()} for kind in ("banks", "errors")
    )
    counts = int(state["rows"]), bool(state["is_skipped"])
    cut, dropped = [int(rows) for rows in state["cut"]], int(state["dropped"])
    redone = [Redone(int(rows), may_be_cut=bool(may)) for rows, may in state["redone"]]
    before, scale = (
        {"value": float(state[name]["value"]), "clean": int(state[name]["clean"])}
        for name in ("scale_before", "scale")
    )
    if fold:
        sums.division = Division.of(fold)
        sums.values, sums.weights = [*map(dict, fold["sums"])], [*map(dict, fold["weights"])]
        sums.has_flowed, sums.gradients = bool(fold["has_flowed"]), sums.apart([*banks])
        sums.gradients.restore(banks, errors)
    sums.total = sum(cut)
    sums.rows, sums.dropped, sums.redone, sums.scale_before = cut, dropped, redone, before
    task.scale.load(scale)
    return counts


def _tensor(value: Tensor, like: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a copy of the value, laid out as a parameter is."""
    if (value.dtype, value.shape) != (dtype, like.shape):
        raise ValueError(f"{value.dtype} {tuple(value.shape)} for {dtype} {tuple(like.shape)}")
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(value)
