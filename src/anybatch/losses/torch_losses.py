"""A loss of torch as a sum and a weight, exact in every cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES, Batch, LossError, Number, torch_private as private
from anybatch.losses.inputs import call_model, noted, split_batch
from anybatch.losses.loss import Evaluated, Loss
from anybatch.losses.reductions import FUNCTIONS, MODULES, Kind, deprecated_in, summed, trained_in
from anybatch.losses.terms import bare_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedLoss(Loss):
    """A loss of torch, read from the caller's object at the start of each step."""

    name: str  # class or function name of the caller's loss
    kind: Kind  # its summation and divisor
    settings: Mapping[str, Any]  # the caller's keyword arguments or module attributes
    reduced: Callable[..., Tensor]  # the caller's loss with its own reduction
    reduce: Callable[[str], Callable[..., Tensor]]  # the loss with the reduction "none" or "sum"
    wanted: int  # number of compared tensors
    is_sum: bool  # the reduction is "sum"
    is_batchmean: bool
    divided: bool = False  # True if the batch is uncut: the value is the caller's own and needs no division

    @property
    def counted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if valid targets are counted on the whole batch, or for a sum, whose divisor is 1."""
        return self.kind.counted or self.is_sum

    def evaluate(self, model: nn.Module, micro: Any) -> Evaluated:
        """Run the model, then the loss; return a sum unless the loss is divided."""
        kind = self.kind
        inputs, targets = split_batch(micro, has_target=kind.has_target)
        if kind.per_row:
            self._refuse_settings_of_rows(targets)
        outputs = call_model(model, inputs)
        if len(outputs) + len(targets) != self.wanted:
            raise LossError(
                f"Expected {self.wanted} tensors for {self.name}, got {len(outputs)} from the model and "
                f"{len(targets)} as target. Let the model return only what the loss compares, or write the "
                "loss as a function (model, micro) -> ab.Total."
            )
        arguments = kind.arrange(outputs, targets)
        if not kind.keeps_rows_apart(arguments):
            self._refuse_crossed_rows(arguments)
        if self.divided:
            value = noted(self.reduced, *arguments)
            if value.dim():
                raise LossError(
                    f"Expected the loss to be a scalar, got shape {tuple(value.shape)}. {bare_mean()}"
                )
            count = 0 if kind.counted else self._weigh(arguments, targets)
        elif kind.counted and getattr(arguments[0], "dtype", None) not in SHORT_DTYPES:
            value, count = noted(self.reduce("sum"), *arguments), 0  # one kernel
        else:
            losses = noted(self.reduce("none"), *arguments)
            value = summed(losses if self.is_sum else kind.terms(losses, arguments))
            # Counting the losses themselves is right for any broadcast.
            count = losses.shape[0] if self.is_batchmean else losses.numel()
        if kind.counted:
            # On demand, and from the targets alone, so that outputs are freed before backward.
            return Evaluated({"loss": value}, lambda: {"loss": self._weigh((), targets)})
        return Evaluated({"loss": value}, lambda: {"loss": count})

    def divisors(self, batch: Batch, first: Evaluated, first_rows: int) -> Mapping[str, Number] | None:
        """Return the weight of the whole batch: counted from its targets, or in proportion to its rows."""
        if self.is_sum:
            return {"loss": 1}
        if first_rows == batch.rows:
            return first.weigh()
        if self.kind.counted:
            return None if batch.whole is None else {"loss": self._weigh((), split_batch(batch.whole)[1])}
        weight = first.weigh()["loss"]
        # All rows weigh the same, so this division has no remainder. Checked at the end of the step.
        return {"loss": weight * batch.rows // first_rows} if batch.rows else None

    def uncut(self) -> Loss:
        """Return the loss with torch's own reduction, bit-identical."""
        return replace(self, divided=True) if self.kind.shape_tells else self

    def _refuse_crossed_rows(self, arguments: tuple[Any, ...]) -> None:
        shapes = [tuple(one.shape) for one in arguments if isinstance(one, Tensor)]
        if len(shapes[0]) < self.kind.axes:
            raise LossError(
                f"Expected at least {self.kind.axes} axes of what {self.name} compares, one of them for "
                f"rows, got shape {shapes[0]}, which torch would take for a single row. Return scores or "
                "features of shape (rows, ...) from the model; sequences (time, rows, classes)."
            )
        raise LossError(
            f"Expected output and target of {self.name} to have as many axes and as many rows in the first, "
            f"got shapes {' and '.join(map(str, shapes))}, which torch would broadcast row against row. "
            "Reshape one of them, as in target[:, None] or output.squeeze(-1)."
        )

    def _refuse_settings_of_rows(self, targets: tuple[Any, ...]) -> None:
        """Raise LossError for a setting with an axis of rows: torch broadcasts from the last axis."""
        for name in self.kind.per_row:
            value, target = self.settings.get(name), targets[0] if targets else None
            if not (isinstance(value, Tensor) and isinstance(target, Tensor) and value.dim()):
                continue
            if len(value) != 1 and (name == "var" or value.dim() >= target.dim() > 0):
                raise LossError(
                    f"Expected `{name}` of {self.name} without an entry for every row, got shape "
                    f"{tuple(value.shape)} for {len(target)} rows. Put it into the batch, and write the loss "
                    "as a function (model, micro) -> Total."
                )

    def _weigh(self, arguments: tuple[Any, ...], targets: tuple[Any, ...]) -> Number:
        if self.is_batchmean:
            return arguments[0].shape[0]
        return self.kind.weigh(self.settings, arguments, targets)


def summed_loss(loss: Any) -> SummedLoss | None:
    """Return a loss module, function or partial function of torch as a `SummedLoss`; None for others.

    Raises LossError if it has a reduction or arguments that cannot be summed.
    """
    if isinstance(loss, nn.Module):
        return _from_module(loss)
    function = loss.func if isinstance(loss, partial) else loss
    settings: Mapping[str, Any] = loss.keywords if isinstance(loss, partial) else {}
    kind = FUNCTIONS.get(cast("Any", function)) if callable(function) else None
    if kind is None:
        return None
    if isinstance(loss, partial) and loss.args:
        raise LossError(
            f"Expected keyword arguments only in the partial loss, got positional {loss.args}. Name them."
        )
    return _summed(function.__name__, kind, settings, loss)


def _from_module(loss: nn.Module) -> SummedLoss | None:
    base = next((base for base in type(loss).__mro__ if base in MODULES), None)
    # A subclass, or an object, with its own forward is another loss.
    if base is None or type(loss).forward is not base.forward or "forward" in vars(loss):
        return None
    settings = {**vars(loss), **private.parameters_of(loss), **private.buffers_of(loss)}
    return _summed(type(loss).__name__, MODULES[base], settings, loss)


def _summed(name: str, kind: Kind, settings: Mapping[str, Any], reduced: Callable[..., Tensor]) -> SummedLoss:
    reduction = settings.get("reduction", "mean")
    if deprecated := deprecated_in(settings):
        raise LossError(
            f"Expected {name} with reduction='mean' or 'sum', got the deprecated {' and '.join(deprecated)}. "
            "Write reduction= in their place."
        )
    if reduction not in kind.reductions:
        none = ", or pass it in ab.PerRow(...) for the mean of all its values"
        raise LossError(
            f"Expected {name} with a reduction of {kind.reductions}, got {reduction!r}: a step needs one "
            f"number to minimise. Choose one of them{none if reduction == 'none' else ''}."
        )
    for key in trained_in(settings):
        raise LossError(
            f"Expected `{key}` of {name} without gradient, got one that requires grad. Use .detach()."
        )
    return SummedLoss(
        name=name,
        kind=kind,
        settings=settings,
        reduced=reduced,
        reduce=_reducer(reduced),
        is_sum=reduction == "sum",
        is_batchmean=reduction == "batchmean",
        wanted=kind.arguments - ("var" in settings),  # a constant variance
    )


def _reducer(loss: Callable[..., Tensor]) -> Callable[[str], Callable[..., Tensor]]:
    @cache
    def reduce(reduction: str) -> Callable[..., Tensor]:
        if not isinstance(loss, nn.Module):
            return partial(loss, reduction=reduction)
        twin = object.__new__(type(loss))  # a shallow copy, at a tenth of the time of copy.copy
        vars(twin).update(vars(loss), reduction=reduction)
        return twin

    return reduce
