"""From the finished gradient to new weights: clip once, hand over, update, one scheduler step."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch import core
from anybatch.core import torch_private as private
from anybatch.integrations import unprepared

_KIND = attrgetter("device", "dtype")
_TORN = "Some parameters may be updated and others not, which cannot be undone: go on from a checkpoint."
_UNKNOWN = (
    "It is unknown what has been updated, as the optimizer is not one of torch's own, is fused or has hooks, "
    "and it cannot be undone: go on from a checkpoint."
)


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all entries, a scalar, as `torch.nn.utils.get_total_norm` computes it."""
    # A sparse gradient's norm is that of its values, each place once.
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    if len({*map(_KIND, dense)}) == 1:
        return torch.linalg.vector_norm(torch.stack([*private.foreach_norm(dense)]))
    return get_total_norm(dense)


def clip(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the whole batch's gradient in place, once, so that its 2-norm is at most `max_norm`.

    The arithmetic is that of `torch.nn.utils.clip_grad_norm_`, in the accumulator's dtype.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for value in map(core.local, gradients):
        value.mul_(factor.to(value.device))


def clip_entries(gradient: dict[nn.Parameter, Tensor], largest: float) -> None:
    """Clamp each entry of the whole batch's gradient in place, as `torch.nn.utils.clip_grad_value_` does.

    The entries of a sparse gradient are its sums, each place once.
    """
    for parameter, value in gradient.items():
        if value.is_sparse:
            gradient[parameter] = value = value.coalesce()
            value = value.values()
        value.clamp_(-largest, largest)


def step_optimizers(
    gradients: Mapping[nn.Parameter, Tensor], optimizers: Iterable[Optimizer], foreach: bool | None = None
) -> None:
    """Hand the gradients over, then one step of each optimizer; `foreach` as in a `Plan`.

    Raises:
        TornUpdateError: an optimizer failed after it may have written to parameters.
        OutOfMemoryError: memory ran out before anything was written.
    """
    for parameter, gradient in gradients.items():
        parameter.grad = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
    for index, optimizer in enumerate(optimizers):
        noted = _Noted(optimizer)
        try:
            if foreach is None:
                optimizer.step()
            else:
                with _set(optimizer, foreach):
                    optimizer.step()
        except BaseException as error:
            torn = noted.torn() or (_TORN if index else "")
            if not core.ran_out_of_memory(error):
                if torn:
                    error.add_note(torn)
                    raise TornUpdateError(error) from None
                raise
            said = core.released(error)
        else:
            continue
        core.free_caches()
        failed = core.OutOfMemoryError(
            f"Expected the update by {type(optimizer).__name__} to fit into memory, got none left ({said}). "
            f"{torn or 'No update was made.'} Take an optimizer with a smaller state, train fewer "
            "parameters, or free memory."
        )
        raise TornUpdateError(failed) if torn else failed
    # Inside of an autocast of the caller's own torch would go on with weights that were cast before.
    torch.clear_autocast_cache()


def zero_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Call the `zero_grad` of optimizers that have one of their own."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            optimizer.zero_grad()


class TornUpdateError(Exception):
    """An optimizer, or what follows it, failed after parameters may have been written: nothing is put back.

    Attributes:
        error: what it raised, with a sentence that says so.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Noted:
    """The tensors that an optimizer writes to, so that a failed step shows whether it has written.

    Others than torch's own may write through `.data`, which no version tells; fused kernels do not tell it
    either, and hooks may do anything. Those are taken to have written.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = _is_known(optimizer)
        if not self._is_known:
            return
        state = optimizer.state
        self._slots = {p: slots.copy() for p, slots in state.items() if isinstance(slots, dict)}
        held = [one for slots in self._slots.values() for one in slots.values() if isinstance(one, Tensor)]
        parameters = owned([optimizer])
        # Of the gradients too: SGD with momentum of Nesterov's kind adds to them.
        self._watched = [*parameters, *[p.grad for p in parameters if p.grad is not None], *held]
        self._versions = private.versions(self._watched)

    def torn(self) -> str:
        """Return the sentence for an update that has written; if nothing was written, drop new state."""
        if not self._is_known:
            return _UNKNOWN
        if private.versions(self._watched) != self._versions:
            return _TORN
        state = self._optimizer.state
        for parameter in [*state]:
            if parameter not in self._slots:
                del state[parameter]
            elif isinstance(state[parameter], dict):
                slots = state[parameter]
                slots.clear()
                slots.update(self._slots[parameter])
        return ""


def _is_known(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return False
    # What a scheduler puts there wraps the class's own.
    step = vars(optimizer).get("step", kind.step)
    if step is not kind.step and unwrap(step) is not unwrap(kind.step):
        return False
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return not (is_fused or private.hooks_of_optimizer(optimizer))


@contextmanager
def _set(optimizer: Optimizer, foreach: bool) -> Generator[None]:
    """Other settings for a while: common operations or not."""
    able = [one for one in optimizer.param_groups if "foreach" in one and not one.get("fused")]
    was = [group["foreach"] for group in able]
    for group in able:
        group["foreach"] = foreach
    try:
        yield
    finally:
        for group, value in zip(able, was, strict=True):
            group["foreach"] = value


def schedule_learning_rates(schedulers: Iterable[LRScheduler]) -> None:
    """One step of each scheduler, after the update."""
    for scheduler in schedulers:
        scheduler.step()


def learning_rate_of(optimizers: Sequence[Optimizer]) -> float:
    """Return that of the first optimizer's first group of parameters; NaN if it is not a number."""
    try:
        return float(optimizers[0].param_groups[0]["lr"])
    except (LookupError, TypeError, ValueError, RuntimeError):
        return math.nan


def owned(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of these optimizers, in their order, the frozen ones too."""
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


def check_optimizers(optimizer: object, known: Iterable[nn.Parameter]) -> tuple[Optimizer, ...]:
    """One optimizer or a sequence of them, as a tuple; `known` are parameters of the model and the loss.

    Raises:
        OptimizerError: none at all, no torch optimizer, LBFGS, one without any known parameter, or two that
            share one.
    """
    optimizers = () if optimizer is None else tuple(map(unprepared, _as_tuple(optimizer)))
    if not optimizers:
        raise core.OptimizerError(
            f"Expected an optimizer, got {optimizer!r}. {_EXAMPLE} A loop that makes its updates "
            "itself takes ab.BatchLoss."
        )
    ours = set(known)
    owners: dict[nn.Parameter, int] = {}
    for index, one in enumerate(optimizers):
        if isinstance(one, LBFGS):
            raise core.OptimizerError(
                f"Expected an optimizer that makes one update from one gradient, got {type(one).__name__}. "
                "It asks for the loss again and again within one update; use another one."
            )
        if not isinstance(one, Optimizer):
            raise core.OptimizerError(f"Expected a torch optimizer, got {core.kind_of(one)}. {_EXAMPLE}")
        parameters = owned([one])
        if ours.isdisjoint(parameters):
            raise core.OptimizerError(
                f"Expected optimizer {index} to hold parameters of the model, got {len(parameters)} that are "
                "none of its. Make it from model.parameters(), after the model was moved or wrapped."
            )
        shared = [p for p in parameters if owners.setdefault(p, index) != index]
        if shared:
            raise core.OptimizerError(
                f"Expected every parameter in one optimizer, got {len(shared)} in optimizers "
                f"{owners[shared[0]]} and {index}. Each update would be made twice; give it to one of them."
            )
    return optimizers


def check_schedulers(scheduler: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    """One scheduler or a sequence of them, as a tuple.

    Raises:
        OptimizerError: no scheduler, one that waits for a metric, or one of another optimizer.
    """
    schedulers = tuple(map(unprepared, _as_tuple(scheduler)))
    for one in schedulers:
        if not isinstance(one, LRScheduler) or isinstance(one, ReduceLROnPlateau):
            advice = (
                "Make one of torch.optim.lr_scheduler from the same optimizer, as in StepLR(optimizer, 10)."
            )
            if isinstance(one, ReduceLROnPlateau):
                advice = "It waits for a metric: leave it out, and step it yourself after validation."
            raise core.OptimizerError(
                f"Expected a scheduler that steps once per update, got {core.kind_of(one)}. {advice}"
            )
        if not any(one.optimizer is optimizer for optimizer in optimizers):
            raise core.OptimizerError(
                f"Expected {type(one).__name__} to schedule an optimizer of this step, got one for another. "
                "Make it from the same optimizer."
            )
    return schedulers


_EXAMPLE = "Pass torch.optim.SGD(model.parameters(), lr=...) or another."


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if core.is_sequence(given) else (given,)
