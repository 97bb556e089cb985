"""A window saved half-way: its sums and what it would put back, as plain values, and read again."""

# Who writes a run down, and puts one together again, has to know its inside.
# pyright: reportPrivateUsage=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import CheckpointError
from anybatch.engine import Gradients, Plan, Redone, Run, Task, accumulation_dtype
from anybatch.step import noted
from anybatch.step.noted import Noted, copied, plain, tensor

FORMAT = "window 1"
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


def write(
    run: Run, task: Task, settings: Plan, loss: object, *, rows: int, is_skipped: bool
) -> dict[str, Any]:
    """All that a window needs to go on elsewhere: copies on the host, as a checkpoint can hold them.

    Args:
        run: its sums.
        task: what it is carried out on.
        settings: what was decided without looking at the rows.
        loss: as the caller gave it.
        rows: added so far.
        is_skipped: whether no update is to be made.
    """
    return {
        "format": FORMAT,
        "made": _conditions(task, settings, loss),
        "bits": _bits(task.parameters),
        "rows": rows,
        "is_skipped": is_skipped,
        "cut": list(run.rows),
        "redone": [[one.rows, one.may_be_cut] for one in run.redone],
        "dropped": run.dropped,
        "fold": _fold(run) if run.rows else {},  # nothing was added before that
        "gradients": _gradients(run.gradients) if run.rows else {},
        "before": noted.write(run.before, task),
        "scale": task.scale.state(),
        "scale_before": run.scale_before,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halfway:
    """A state that was read and found to fit; nothing has been touched yet.

    Attributes:
        rows: added so far.
        is_skipped: whether no update is to be made.
        counts: attributes of a run that are plain values.
        fold: sums, weights and divisors, attributes of a run too; empty where nothing was added.
        banks: the gradient sums of each term, by parameter.
        errors: their rounding errors, where sums are compensated.
        in_place: the gradient sums that stand in `.grad`.
        before: what was noted before the first micro-batch.
        scale: the loss scale.
        scale_before: the loss scale when the window began.
    """

    rows: int
    is_skipped: bool
    counts: Mapping[str, Any]
    fold: Mapping[str, Any]
    banks: Mapping[str, Mapping[nn.Parameter, Tensor]]
    errors: Mapping[str, Mapping[nn.Parameter, Tensor]]
    in_place: Mapping[nn.Parameter, Tensor]
    before: Noted
    scale: Mapping[str, Any]
    scale_before: Mapping[str, Any]

    def into(self, run: Run, task: Task, settings: Plan) -> None:
        """Let a run that has just begun go on from here.

        Args:
            run: without any micro-batch yet.
            task: what it is carried out on.
            settings: what was decided without looking at the rows.
        """
        for name, value in {**self.counts, **self.fold}.items():
            setattr(run, name, value)
        if self.fold:
            self._sums_into(run, task, settings)
        self.before.into(run.before)
        task.scale.load(dict(self.scale))
        run.scale_before = dict(self.scale_before)

    def _sums_into(self, run: Run, task: Task, settings: Plan) -> None:
        gradients = Gradients(
            task.parameters,
            dtype=settings.accumulation_dtype,
            compensated=settings.compensated,
            banks=list(self.banks),
            bucket=settings.bucket if run.is_guarded else None,
        )
        for name, bank in self.banks.items():
            gradients._banks[name].update(bank)
            errors = self.errors.get(name, {})
            gradients._errors.update({bank[parameter]: error for parameter, error in errors.items()})
        for parameter, total in self.in_place.items():
            parameter.grad = total
        gradients._awaited = [parameter for parameter in gradients._awaited if parameter.grad is None]
        gradients.begin()
        run.gradients = gradients


def read(state: Mapping[str, Any], task: Task, settings: Plan, loss: object) -> Halfway:
    """Read what `write` gave, for the same step; nothing is touched, and the state stays as it is.

    Raises:
        CheckpointError: it is something else, or of a step that differs in what the sums depend on.
    """
    try:
        _check(state, task, settings, loss)
        return _read(state, task, settings)
    except _UNREADABLE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"Expected the state of a window as Window.state() gives it, got one that cannot be read "
            f"({type(error).__name__}: {error}). Use an earlier checkpoint."
        ) from None


def _check(state: Mapping[str, Any], task: Task, settings: Plan, loss: object) -> None:
    if state["format"] != FORMAT:
        raise ValueError(f"a state of the format {state['format']!r}, not {FORMAT!r}")
    there, here = state["made"], _conditions(task, settings, loss)
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
    pairs = zip(state["bits"], _bits(task.parameters), state["made"]["parameters"], strict=True)
    moved = [form for was, now, form in pairs if was != now]
    if moved:
        raise CheckpointError(
            "Expected parameters with the values that the window's gradients were taken at, got others in "
            f"{len(moved)} of {len(state['bits'])}, the first of them {moved[0]}. Restore the model that was "
            "saved along with the window first."
        )


def _conditions(task: Task, settings: Plan, loss: object) -> dict[str, Any]:
    """What the sums depend on besides rows and values, in words."""
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    return {
        "parameters": [
            f"{names.get(one, 'not of the model')} {_word(one.dtype)} {tuple(one.shape)}"
            for one in task.parameters
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
    """A loss by its name; one of torch's with its settings, such as a reduction."""
    inner = getattr(loss, "function", loss)  # of ab.Terms
    given: Mapping[str, Any] = getattr(inner, "keywords", {})  # of a partial
    inner = getattr(inner, "func", inner)
    if isinstance(inner, nn.Module) and type(inner).__module__.startswith("torch."):
        given = {name: value for name, value in vars(inner).items() if name[0] != "_" and name != "training"}
    plain = [
        f"{name}={given[name]!r}" for name in sorted(given) if isinstance(given[name], int | float | str)
    ]
    return f"{getattr(inner, '__qualname__', type(inner).__name__)}({', '.join(plain)})"


def _bits(parameters: Sequence[nn.Parameter]) -> list[int]:
    """A sum of each parameter's bits, read as whole numbers: the same in any order, on any device."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums: list[Tensor] = []
    for parameter in parameters:
        value = parameter.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        sums.append(value.view(whole[value.element_size()]).sum(dtype=torch.int64))
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


# ---- sums


def _fold(run: Run) -> dict[str, Any]:
    cotangents = None if run._divisors is None else run._cotangents
    return {
        "coefficients": {name: float(value) for name, value in run._coefficients.items()},
        "divisors": None if run._divisors is None else _floats(run._divisors),
        "cotangents": {
            name: [copied(value), str(value.device)] for name, value in (cotangents or {}).items()
        },
        "sums": [_floats(sums) for sums in run._sums],
        "weights": [_floats(weights) for weights in run._weights],
        "flowed": run._flowed,
    }


def _read_fold(values: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The attributes of a run; none where nothing was added."""
    if not values:
        return {}
    here = {str(device): device for device in task.devices}
    fallback = next(iter(task.devices), torch.device("cpu"))
    return {
        "_coefficients": dict(values["coefficients"]),
        "_divisors": None if values["divisors"] is None else dict(values["divisors"]),
        "_cotangents": {
            name: value.to(here.get(device, fallback), copy=True)
            for name, (value, device) in values["cotangents"].items()
        },
        "_sums": [dict(sums) for sums in values["sums"]],
        "_weights": [dict(weights) for weights in values["weights"]],
        "_flowed": bool(values["flowed"]),
    }


def _gradients(gradients: Gradients) -> dict[str, Any]:
    """Sums and their rounding errors by bank and the position of the parameter; those in `.grad` by it."""
    position = {parameter: index for index, parameter in enumerate(gradients._parameters)}
    errors = gradients._errors
    return {
        "banks": {
            name: {position[parameter]: plain(total) for parameter, total in bank.items()}
            for name, bank in gradients._banks.items()
        },
        "errors": {
            name: {position[p]: plain(errors[total]) for p, total in bank.items() if total in errors}
            for name, bank in gradients._banks.items()
        },
        "in_place": {position[one]: plain(one.grad) for one in gradients._in_place if one.grad is not None},
    }


def _read(state: Mapping[str, Any], task: Task, settings: Plan) -> Halfway:
    fold = _read_fold(state["fold"], task)
    found = state["gradients"] if fold else {"banks": {}, "errors": {}, "in_place": {}}
    names = list(fold.get("_coefficients", ()))
    expected = names if not fold or fold["_divisors"] is None else names[:1]
    if list(found["banks"]) != expected:
        raise ValueError(f"gradients of {list(found['banks'])}, not of {expected}")

    def sums(values: Mapping[int, Any], *, in_place: bool = False) -> dict[nn.Parameter, Tensor]:
        pairs = [(task.parameters[int(position)], value) for position, value in values.items()]
        chosen = settings.accumulation_dtype
        dtypes = {p: p.dtype if in_place else accumulation_dtype(p.dtype, chosen) for p, _ in pairs}
        return {p: tensor(value, p, dtypes[p]) for p, value in pairs}

    return Halfway(
        rows=int(state["rows"]),
        is_skipped=bool(state["is_skipped"]),
        counts={
            "rows": [int(rows) for rows in state["cut"]],
            "redone": [Redone(int(rows), may_be_cut=bool(may)) for rows, may in state["redone"]],
            "dropped": int(state["dropped"]),
        },
        fold=fold,
        banks={name: sums(values) for name, values in found["banks"].items()},
        errors={name: sums(values) for name, values in found["errors"].items()},
        in_place=sums(found["in_place"], in_place=True),
        before=noted.read(state["before"], task),
        scale=_scale(state["scale"]),
        scale_before=_scale(state["scale_before"]),
    )


def _scale(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": float(state["value"]), "clean": int(state["clean"])}


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
