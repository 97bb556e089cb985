"""Interception of a model's own loss: every mean in it becomes a sum and a weight."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import Signature, currentframe, signature
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from anybatch.core import SHORT_DTYPES, Number, accelerator, torch_private as private
from anybatch.losses.cotangents import nodes_behind
from anybatch.losses.reductions import (
    CLASSES,
    DEPRECATED,
    ELEMENTS,
    FUNCTIONS,
    WEIGHTED_FUNCTIONS,
    Kind,
    deprecated_in,
    summed,
    trained_in,
)

MEANS = (torch.mean, Tensor.mean)
SUMS = (torch.sum, Tensor.sum)
_WATCHED = frozenset({*FUNCTIONS, *MEANS, *SUMS, F.pad})

# Autograd nodes that select elements, so that their number may vary.
_SELECTS = ("IndexBackward", "MaskedSelectBackward", "IndexSelectBackward")
_NEAR = 48  # nodes before a mean that are searched

widened = accelerator.widened


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """The data from which the weight of a reduction is counted."""

    kind: Kind  # defines the divisor
    settings: Mapping[str, Any]  # the arguments of the call by name
    target: Tensor | None  # the target of the loss; None for a plain mean
    classes: int = 0  # number of classes; 0 for losses whose targets are not counted

    @property
    def counts_classes(self) -> bool:
        """True if the weight depends on the values of integer targets (not for probabilities)."""
        if self.kind.weigh is not CLASSES.weigh or self.target is None:
            return False
        return not self.target.is_floating_point()

    @property
    def ignored(self) -> int:
        """The target value that does not count."""
        return int(self.settings.get("ignore_index", -100))

    def weigh(self, target: Tensor) -> Number:
        """Return the weight of other targets under the same settings."""
        return self.kind.weigh(self.settings, (), (target,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A reduction of many losses to one number."""

    name: str  # the called function
    value: Tensor  # the value that the model received
    node: Node | None  # the autograd node of the value
    total: Tensor | None  # the sum of the losses; None if it is computed from the mean
    weight: Number  # the divisor of the sum
    is_sum: bool  # True if the model asked for the sum
    source: Node | None  # the autograd node of the reduced tensor; None for losses with counted targets
    origin: Origin  # the data from which the weight is counted
    fixed: Mapping[str, Any]  # settings of the call that must be the same in all micro-batches
    pairs_rows: bool = False  # True if the target of row i is class i, of as many classes as rows
    shape: tuple[int, ...] = ()  # shape of the reduced tensor; () for losses with counted targets
    picks: bool = False  # (copies without graph) True if an index selected the reduced elements
    may_be_parameters: bool = False  # (copies without graph) True if it has the shape of a parameter
    is_readable: bool = False  # True for a mean over classes whose node saves its divisor

    @property
    def sum(self) -> Tensor:
        """The sum of the losses."""
        return sum_of(self.value, self.weight) if self.total is None else self.total

    def forgotten(self) -> "Reduction":
        """Return a copy without its graph, for comparison, with a snapshot of the settings."""
        fixed = {
            key: one.detach().clone() if isinstance(one, Tensor) else one for key, one in self.fixed.items()
        }
        seen = {"picks": selects(self.source), "may_be_parameters": is_like_parameters(self)}
        value = self.value.detach()
        return replace(self, value=value, node=None, total=None, source=None, fixed=fixed, **seen)


class Watch(TorchFunctionMode):
    """A context that records every call that reduces losses to one number.

    A recorded loss is computed as a sum, and the model gets the sum divided by its weight; kernels and casts
    are the model's own. A mean of nothing is 0, not NaN, because another micro-batch may have elements.
    Means over classes whose divisor can be read, and means and sums over all elements, are recorded
    unchanged: they round as they do where nobody watches. With `as_is` every value is unchanged.

    Attributes:
        found: the recorded reductions, in order.
        padded: True if labels were padded by one position, as in next-token prediction.
    """

    def __init__(self, model: nn.Module, *, as_is: bool = False) -> None:
        super().__init__()
        self._widest = max((p.dtype.itemsize for p in model.parameters()), default=0)
        self.found: list[Reduction] = []
        self.padded = False
        self._as_is = as_is

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:  # the usual case
            return func(*args, **kwargs)
        if func in FUNCTIONS:
            return self._loss(func, args, kwargs)
        value = func(*args, **kwargs)
        if func is F.pad:
            self.padded |= not value.is_floating_point() and tuple((*args, *kwargs.values())[1]) == (0, 1)
            return value
        return self._fold(value, args, kwargs, is_sum=func in SUMS)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        bound = _signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        kind, settings = FUNCTIONS[func], dict(bound.arguments)
        if settings["reduction"] not in kind.reductions or deprecated_in(settings) or trained_in(settings):
            return func(*args, **kwargs)  # unchanged; refused later if the loss depends on it
        if settings.get("weight") is not None:
            kind = WEIGHTED_FUNCTIONS.get(func, kind)

        def call(reduction: str) -> Tensor:
            bound.arguments["reduction"] = reduction
            return func(*bound.args, **bound.kwargs)

        runs_again = _is_checkpointed()
        read = partial(_read, func.__name__, kind, settings, call)
        is_plain = kind is CLASSES and not runs_again and _is_plain_mean(settings)
        noted = read(as_is=is_plain or runs_again or self._as_is)
        if is_plain and self._is_readable(noted):
            noted = replace(noted, is_readable=True)
        elif is_plain and not self._as_is:
            noted = read(as_is=False)
        return self._note(noted)

    def _is_readable(self, noted: Reduction) -> bool:
        """Return True if a mean times its divisor is as exact as the sum: one number is rounded more."""
        dtype = noted.value.dtype
        return noted.origin.counts_classes and dtype not in SHORT_DTYPES and dtype.itemsize >= self._widest

    def _fold(
        self, value: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_sum: bool
    ) -> Tensor:
        """Record a mean or a sum over all elements; its value is unchanged, as it may not be a loss."""
        given: Any = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or not given.dim() or value.dim() or self._is_of_losses(given):
            return value
        if is_sum and not value.requires_grad:  # a count
            return value
        count = given.numel()
        noted = Reduction(
            name="sum" if is_sum else "mean",
            value=value,
            node=value.grad_fn,
            # Computed from the mean on demand: a sum may overflow float16, and a checkpointed block must run
            # the same operations now as when it is recomputed without this context.
            total=None if count or is_sum else given.sum(),
            weight=1 if is_sum else count,
            is_sum=is_sum,
            source=given.grad_fn,
            origin=Origin(kind=ELEMENTS, settings={}, target=None),
            fixed={},
            shape=tuple(given.shape),
        )
        return self._note(noted)

    def _is_of_losses(self, given: Tensor) -> bool:
        noted = {one.node for one in self.found}
        is_reached = False
        for count, node in enumerate(nodes_behind(given.grad_fn if noted else None, noted)):
            if node in noted:
                is_reached = True
            elif count > _NEAR or hasattr(node, "variable"):
                return False
        return is_reached

    def _note(self, noted: Reduction) -> Tensor:
        self.found.append(noted)
        return noted.value.clone()  # models add to a loss in place


def _read(
    name: str, kind: Kind, settings: Mapping[str, Any], call: Callable[[str], Tensor], *, as_is: bool
) -> Reduction:
    reduction = settings["reduction"]
    is_sum, is_per_row = reduction == "sum", reduction == "batchmean"
    compared = tuple(settings.values())[: kind.arguments]
    arguments = tuple(one for one in compared if isinstance(one, Tensor))  # a variance may be a number
    target = compared[-1] if isinstance(compared[-1], Tensor) else None
    losses = total = None
    if as_is:
        value = call(reduction)
    elif kind.counted and compared[0].dtype not in SHORT_DTYPES:
        value = total = call("sum")  # one kernel
    else:
        value = losses = call("none")
        total = summed(losses if is_sum else kind.terms(losses, compared))
    if is_sum:
        weight: Number = 1
    elif is_per_row:
        weight = compared[0].shape[0]
    elif losses is None or kind.counted:
        weight = kind.weigh(settings, arguments, (target,))
    else:
        weight = losses.numel()
    if total is not None:
        value = _divided(total, weight).to(value.dtype)
    # All but the tensors that are compared and the reduction.
    names = list(settings)[kind.arguments :]
    kept = {name: settings[name] for name in names if name not in ("reduction", *DEPRECATED)}
    return Reduction(
        name=name,
        value=value,
        node=value.grad_fn,
        total=total,
        weight=weight,
        is_sum=is_sum,
        source=None if losses is None else losses.grad_fn,
        origin=Origin(
            kind=kind,
            settings=kept,
            target=target,
            classes=classes_in(compared) if kind.weigh is CLASSES.weigh else 0,
        ),
        fixed=_fixed(kind, kept, compared[0]),
        pairs_rows=kind.counted and pairs_rows(compared[0], target),
        shape=() if losses is None else tuple(losses.shape) or (1,),
    )


def selects(source: Node | None) -> bool:
    """Return True if a mask or index nearby selected the reduced elements, so that their number may vary."""
    return any(node.name().startswith(_SELECTS) and not _takes_one_each(node) for node in _near(source))


def is_like_parameters(one: Reduction) -> bool:
    """Return True if the reduced tensor has the shape of a parameter nearby, flat or not."""
    near: list[Any] = [getattr(node, "variable", None) for node in _near(one.source)]
    return any(one.shape in (tuple(leaf.shape), (leaf.numel(),)) for leaf in near if leaf is not None)


def is_over_means(one: Reduction) -> bool:
    """Return True if the reduced tensor is made of means along an axis nearby."""
    return any(node.name().startswith("MeanBackward1") for node in _near(one.source))


def _is_plain_mean(settings: Mapping[str, Any]) -> bool:
    """Return True if torch computes a mean over classes in one node, which saves its divisor."""
    return (
        settings["reduction"] == "mean"
        and settings["weight"] is None
        and not settings.get("label_smoothing")  # has several nodes
    )


def sum_of(mean: Tensor, weight: Number) -> Tensor:
    """Return mean times weight, with the graph; 0 for the mean of nothing, which is NaN."""
    wide = widened(mean)  # coefficient times 1 / weight rounds once, like torch's mean
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0, wide * weight)
    return wide * weight if weight else wide.nan_to_num(0.0)


def _near(source: Node | None) -> Iterator[Node]:
    return islice(nodes_behind(source), _NEAR)


def _takes_one_each(node: Any) -> bool:
    first = next(iter(private.saved(node, "indices") or ()), None)
    if first is None or first.dim() != 1:
        return False
    return torch.equal(first, torch.arange(len(first), device=first.device))


def _is_checkpointed() -> bool:
    frame = currentframe()  # torch has no other way to detect its checkpoint
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _divided(total: Tensor, weight: Number) -> Tensor:
    if isinstance(weight, Tensor):
        return total / torch.where(weight == 0, 1, weight)
    return total / (weight or 1)


def classes_in(arguments: tuple[Any, ...]) -> int:
    """Return the number of classes of scores (rows, classes, ...) or (classes,), or of a layer."""
    if len(arguments) == 3:
        return arguments[1].shape[0]
    return arguments[0].shape[1 if arguments[0].dim() > 1 else 0]


def pairs_rows(scores: Tensor, target: Tensor | None) -> bool:
    """Return True if the target of row i is class i, of as many classes as rows."""
    if target is None or target.dim() != 1 or scores.shape != (len(target), len(target)):
        return False
    return torch.equal(target, torch.arange(len(target), device=target.device, dtype=target.dtype))


def _fixed(kind: Kind, kept: Mapping[str, Any], scores: Tensor) -> Mapping[str, Any]:
    def holds_rows(name: str, value: Any) -> bool:
        if name not in kind.per_row or not isinstance(value, Tensor) or not scores.dim():
            return False
        return value.dim() == scores.dim() and value.shape[0] == scores.shape[0]

    return {name: value for name, value in kept.items() if not (callable(value) or holds_rows(name, value))}


def is_equal(one: Any, other: Any) -> bool:
    """Return True if two settings are equal, on any devices."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.to(other.device), other)
    return type(one) is type(other) and one == other


@cache
def _signature(function: Callable[..., Tensor]) -> Signature:
    return signature(function)
