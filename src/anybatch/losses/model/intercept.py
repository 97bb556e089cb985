"""Watches a model compute its own loss: every mean in it becomes a sum and a weight."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import Signature, currentframe, signature
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from anybatch.core import SHORT_DTYPES, Number
from anybatch.core import torch_private as private
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

# Nodes of autograd that pick elements out, so that there may be any number of them, and how many nodes before
# a mean they are looked for.
_SELECTS = ("IndexBackward", "MaskedSelectBackward", "IndexSelectBackward")
_NEAR = 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """What the weight of a reduction is counted from."""

    kind: Kind  # what it divides by
    settings: Mapping[str, Any]  # the arguments of its call by name
    target: Tensor | None  # what the loss compares with; None for a plain mean
    classes: int = 0  # how many classes there are; 0 for losses that are not counted

    @property
    def counts_classes(self) -> bool:
        """The weight depends on the values of integer targets; with probabilities all rows weigh the same."""
        if self.kind.weigh is not CLASSES.weigh or self.target is None:
            return False
        return not self.target.is_floating_point()

    @property
    def ignored(self) -> int:
        """The target that does not count."""
        return int(self.settings.get("ignore_index", -100))

    def weigh(self, target: Tensor) -> Number:
        """The weight of other targets under the same settings."""
        return self.kind.weigh(self.settings, (), (target,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """One reduction of many losses to one number."""

    name: str  # the function that was called
    value: Tensor  # what the model got
    node: Node | None  # the place of the value in autograd's graph
    total: Tensor | None  # the same losses summed; None where the mean is to be multiplied again
    weight: Number  # what the sum is divided by
    is_sum: bool  # the model asked for the sum itself
    source: Node | None  # the place of what was reduced in autograd's graph; None for losses that are counted
    origin: Origin  # what the weight is counted from
    fixed: Mapping[str, Any]  # the settings of the call that may not differ between micro-batches
    # the target of row i is class i of as many classes: rows are each other's classes
    pairs_rows: bool = False
    shape: tuple[int, ...] = ()  # of what is reduced; () for losses that are counted
    picks: bool = False  # of one whose graph is forgotten: whether an index picked what is reduced
    may_be_parameters: bool = False  # of one whose graph is forgotten: whether it is shaped like a parameter
    runs_again: bool = False  # whether it stands in a checkpoint

    @property
    def sum(self) -> Tensor:
        """The losses summed."""
        if self.total is not None:
            return self.total
        # A mean of nothing is NaN where the call had to stay as it was, and has nothing to add.
        if isinstance(self.weight, Tensor) and self.weight.device.type != "cpu":  # which would have to stop
            return torch.where(self.weight == 0, 0, widened(self.value) * self.weight)
        return widened(self.value) * self.weight if self.weight else widened(torch.zeros_like(self.value))

    def forgotten(self) -> "Reduction":
        """The same without its graph, for comparison; settings as they are now."""
        fixed = {
            key: one.detach().clone() if isinstance(one, Tensor) else one for key, one in self.fixed.items()
        }
        seen = {"picks": selects(self.source), "may_be_parameters": is_like_parameters(self)}
        value = self.value.detach()
        return replace(self, value=value, node=None, total=None, source=None, fixed=fixed, **seen)


class Watch(TorchFunctionMode):
    """While it is entered, notes every call that reduces losses to one number.

    Each noted call is made with the sum in place of the mean, and the model gets that sum over its weight:
    the kernels, and casts before them, are the model's own. A mean of nothing is 0, not NaN, because
    another micro-batch may have something. Full means and sums are noted too, and stay as they are. With
    `as_is` every value stays as the model computes it. `found` holds what was noted, in order; `padded`
    tells whether labels were padded by one place, as models do that predict the next token.
    """

    def __init__(self, *, as_is: bool = False) -> None:
        super().__init__()
        self.found: list[Reduction] = []
        self.padded = False
        self._as_is = as_is

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call of torch comes by here."""
        kwargs = kwargs or {}
        if func not in _WATCHED:  # nearly all
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
            return func(*args, **kwargs)  # as it is, and refused later where it has a part in the loss
        if settings.get("weight") is not None:
            kind = WEIGHTED_FUNCTIONS.get(func, kind)

        def call(reduction: str) -> Tensor:
            bound.arguments["reduction"] = reduction
            return func(*bound.args, **bound.kwargs)

        runs_again = _is_checkpointed()
        noted = _read(func.__name__, kind, settings, call, as_is=self._as_is or runs_again)
        return self._note(replace(noted, runs_again=runs_again))

    def _fold(
        self, value: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_sum: bool
    ) -> Tensor:
        """A mean or a sum over all elements. The value stays the model's own: bodies take means too."""
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
            # Taken from the mean, when asked for: a sum might not fit in float16, and a checkpointed body
            # that takes a mean must do nothing now that it would not do when it runs again, unwatched.
            total=None if count or is_sum else given.sum(),
            weight=1 if is_sum else count,
            is_sum=is_sum,
            source=given.grad_fn,
            origin=Origin(kind=ELEMENTS, settings={}, target=None),
            fixed={},
            shape=tuple(given.shape),
            runs_again=_is_checkpointed(),
        )
        return self._note(noted)

    def _is_of_losses(self, given: Tensor) -> bool:
        """Whether a mean is one of losses already reduced, as in `torch.stack(losses).mean()`."""
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
    """Sum in place of the reduction that was asked for; as it is, the model's own value to the bit."""
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
    """Whether what is reduced was picked out by a mask or an index, close by, so that it has any length."""
    return any(node.name().startswith(_SELECTS) and not _takes_one_each(node) for node in _near(source))


def is_like_parameters(one: Reduction) -> bool:
    """Whether what is reduced has the shape of a parameter close by, flat or not, and so may have no rows."""
    near: list[Any] = [getattr(node, "variable", None) for node in _near(one.source)]
    return any(one.shape in (tuple(leaf.shape), (leaf.numel(),)) for leaf in near if leaf is not None)


def widened(value: Tensor) -> Tensor:
    """In float64, where a coefficient times 1 / weight rounds once, at the end, as torch's own mean does."""
    return value.float() if value.device.type == "mps" else value.double()  # the one device without it


def _near(source: Node | None) -> Iterator[Node]:
    return islice(nodes_behind(source), _NEAR)


def _takes_one_each(node: Any) -> bool:
    """Whether an index takes one element of every row, as in `scores[torch.arange(rows), last]`."""
    first = next(iter(private.saved(node, "indices") or ()), None)
    if first is None or first.dim() != 1:
        return False
    return torch.equal(first, torch.arange(len(first), device=first.device))


def _is_checkpointed() -> bool:
    """Whether this runs again in the backward, unwatched, so that it must do what it would do then."""
    frame = currentframe()  # torch's checkpoint does not tell otherwise
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _divided(total: Tensor, weight: Number) -> Tensor:
    """0 where there is nothing to divide by."""
    if isinstance(weight, Tensor):
        return total / torch.where(weight == 0, 1, weight)
    return total / (weight or 1)


def classes_in(arguments: tuple[Any, ...]) -> int:
    """The classes of scores (rows, classes, ...) or (classes,), or of a layer (classes, width)."""
    if len(arguments) == 3:
        return arguments[1].shape[0]
    return arguments[0].shape[1 if arguments[0].dim() > 1 else 0]


def pairs_rows(scores: Tensor, target: Tensor | None) -> bool:
    """Whether the target of row i is class i of as many classes."""
    if target is None or target.dim() != 1 or scores.shape != (len(target), len(target)):
        return False
    return torch.equal(target, torch.arange(len(target), device=target.device, dtype=target.dtype))


def _fixed(kind: Kind, kept: Mapping[str, Any], scores: Tensor) -> Mapping[str, Any]:
    """What must be the same in every micro-batch: no entries of rows, and no functions, which may be new."""

    def holds_rows(name: str, value: Any) -> bool:
        if name not in kind.per_row or not isinstance(value, Tensor) or not scores.dim():
            return False
        return value.dim() == scores.dim() and value.shape[0] == scores.shape[0]

    return {name: value for name, value in kept.items() if not (callable(value) or holds_rows(name, value))}


def is_equal(one: Any, other: Any) -> bool:
    """Whether two settings are the same, of any device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.to(other.device), other)
    return type(one) is type(other) and one == other


@cache
def _signature(function: Callable[..., Tensor]) -> Signature:
    return signature(function)
