"""The state of an open window: its sums as plain values, for a checkpoint, and how they are read again."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybatch.core import CheckpointError, torch_private as private
from anybatch.engine.division import Division, to_host
from anybatch.engine.gradients import Apart, Gradient, accumulation_dtype
from anybatch.engine.sums import Redone, Sums
from anybatch.losses import function_of

FORMAT = "window 2"
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


def write(sums: Sums, loss: object, *, rows: int, is_skipped: bool) -> dict[str, Any]:
    """Return all that a window needs to go on elsewhere: plain values, and copies of tensors on the CPU."""
    position = {parameter: index for index, parameter in enumerate(sums.task.network.parameters)}

    def plain(banks: Mapping[str, Gradient]) -> dict[str, dict[int, Any]]:
        return {
            name: {position[parameter]: _plain(total) for parameter, total in bank.items()}
            for name, bank in banks.items()
        }

    fold, gradients = dict[str, Any](), dict[str, Any]()
    if isinstance(sums.gradients, Apart):
        fold = sums.division.plain() | {
            "sums": [*map(to_host, sums.values)],
            "weights": [*map(to_host, sums.weights)],
            "has_flowed": sums.has_flowed,
        }
        gradients = {"banks": plain(sums.gradients.gradients().banks), "errors": plain(sums.gradients.errors)}
    return {
        "format": FORMAT,
        "made": _conditions(sums, loss),
        "bits": _bits(sums.task.network.parameters),
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
        _check(state, sums, loss)
        return _restore(state, sums)
    except _UNREADABLE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"Expected the state of a window as Window.state() gives it, got one that cannot be read "
            f"({type(error).__name__}: {error}). Use an earlier checkpoint."
        ) from None


def _check(state: Mapping[str, Any], sums: Sums, loss: object) -> None:
    if state["format"] != FORMAT:
        raise ValueError(f"a state of the format {state['format']!r}, not {FORMAT!r}")
    there, here = state["made"], _conditions(sums, loss)
    if len(there["parameters"]) == len(here["parameters"]):  # then the first one that differs is enough
        pairs = zip(there["parameters"], here["parameters"], strict=True)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), (0, 0))
        there, here = (
            {**one, "parameters": form} for one, form in zip((there, here), differing, strict=True)
        )
    changed = [
        f"{name} {there[name]} there and {here[name]} here" for name in here if there[name] != here[name]
    ]
    if changed:
        raise CheckpointError(
            f"Expected the state of a window of this step, got one of another: {'; '.join(changed)}. Make "
            "model, loss and step as they were when it was saved."
        )
    pairs = zip(state["bits"], _bits(sums.task.network.parameters), state["made"]["parameters"], strict=True)
    moved = [form for was, now, form in pairs if was != now]
    if moved:
        raise CheckpointError(
            "Expected parameters with the values that the window's gradients were taken at, got others in "
            f"{len(moved)} of {len(state['bits'])}, the first of them {moved[0]}. Restore the model that was "
            "saved along with the window first."
        )


def _conditions(sums: Sums, loss: object) -> dict[str, Any]:
    """Return in words what the sums depend on, besides rows and values."""
    task, settings = sums.task, sums.plan
    names = {parameter: private.plain_name(name) for name, parameter in task.model.named_parameters()}
    return {
        "parameters": [
            f"{names.get(one, 'not of the model')} {str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}"
            for one in task.network.parameters
        ],
        "precision": str(settings.precision),
        "non_finite": settings.non_finite,
        "accumulate": settings.accumulate,
        "compensated": settings.compensated,
        # In a window both take the statistics of each micro-batch, so that its sums are the same.
        "batch_norm": settings.batch_norm or "micro",
        "loss": _named(loss),
        "coefficients": {name: float(value) for name, value in task.loss.coefficients.items()},
    }


def _named(loss: object) -> str:
    """Return the name of a loss; one of torch's with its settings, such as a reduction."""
    inner: Any = function_of(loss)
    given: Mapping[str, Any] = getattr(inner, "keywords", {})  # of a partial
    inner = getattr(inner, "func", inner)
    if isinstance(inner, nn.Module) and type(inner).__module__.startswith("torch."):
        given = {name: value for name, value in vars(inner).items() if name[0] != "_" and name != "training"}
    plain = [
        f"{name}={given[name]!r}" for name in sorted(given) if isinstance(given[name], int | float | str)
    ]
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
    task, fold = sums.task, dict(state["fold"])
    found = state["gradients"] if fold else {"banks": {}, "errors": {}}
    if list(found["banks"]) != list(fold.get("coefficients", ())):
        raise ValueError(f"gradients of {list(found['banks'])}, not of {list(fold.get('coefficients', ()))}")

    def by_parameter(values: Mapping[int, Any]) -> Gradient:
        pairs = [(task.network.parameters[int(position)], value) for position, value in values.items()]
        chosen = sums.plan.accumulation_dtype
        return {p: _tensor(value, p, accumulation_dtype(p.dtype, chosen)) for p, value in pairs}

    banks, errors = (
        {name: by_parameter(values) for name, values in found[kind].items()} for kind in ("banks", "errors")
    )
    counts = int(state["rows"]), bool(state["is_skipped"])
    cut, dropped = [int(rows) for rows in state["cut"]], int(state["dropped"])
    redone = [Redone(int(rows), may_be_cut=bool(may)) for rows, may in state["redone"]]
    scale_before, scale = _scale(state["scale_before"]), _scale(state["scale"])
    if fold:
        sums.division = Division.of(fold)
        sums.values, sums.weights = [*map(dict, fold["sums"])], [*map(dict, fold["weights"])]
        sums.has_flowed, sums.gradients = bool(fold["has_flowed"]), sums.apart([*banks])
        sums.gradients.restore(banks, errors)
    sums.total = sum(cut)
    sums.rows, sums.dropped, sums.redone, sums.scale_before = cut, dropped, redone, scale_before
    task.scale.load(scale)
    return counts


def _scale(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": float(state["value"]), "clean": int(state["clean"])}


def _plain(value: Tensor) -> Any:
    """Return a copy on the CPU; of a sparse tensor its parts, because a checkpoint holds dense ones."""
    parts = private.sparse_parts(value) if value.is_sparse else [value]
    copies = [part.detach().to("cpu", copy=True) for part in parts]
    return [*copies, value.is_coalesced()] if value.is_sparse else copies[0]


def _tensor(value: Any, like: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return the tensor that `_plain` has copied, laid out as a parameter is."""
    if isinstance(value, list):
        indices, values, is_coalesced = cast("list[Any]", value)
        size, device = like.shape, like.device
        found = torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=is_coalesced, check_invariants=True
        )
        return found.to(device, copy=True)
    if (value.dtype, value.shape) != (dtype, like.shape):
        raise ValueError(f"{value.dtype} {tuple(value.shape)} for {dtype} {tuple(like.shape)}")
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(value)
