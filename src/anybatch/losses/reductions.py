"""Watches a model compute its own loss: every mean in it becomes a sum and a weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from anybatch.losses.kinds import CLASSES, FUNCTIONS, WEIGHTED_FUNCTIONS, Kind
from anybatch.total import SHORT_DTYPES, Number

MEANS = (torch.mean, Tensor.mean)
_WATCHED = frozenset({*FUNCTIONS, *MEANS})
_ELEMENTS = Kind(weigh=lambda settings, arguments, targets: arguments[0].numel(), arguments=1)

# Nodes of autograd that fold an axis, turn a matrix or pick elements out, and how many nodes before a mean
# they are looked for.
_FOLDS = tuple(
    f"{name}Backward" for name in ("Sum", "Mean", "Prod", "Amax", "Amin", "Var", "Std", "Logsumexp")
)
_TURNS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0")
_SELECTS = ("IndexBackward", "MaskedSelectBackward", "IndexSelectBackward", "GatherBackward")
_NEAR = 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """What the weight of a reduction is counted from.

    Attributes:
        kind: what it divides by.
        settings: the arguments of its call by name.
        target: what the loss compares with; None for a plain mean.
        classes: how many classes there are; 0 for losses that are not counted.
        axis: the length of the first axis of what is reduced; 0 for losses that are counted.
    """

    kind: Kind
    settings: Mapping[str, Any]
    target: Tensor | None
    axis: int
    classes: int = 0

    @property
    def counts_classes(self) -> bool:
        """The weight depends on the values of integer targets."""
        return self.kind.weigh is CLASSES.weigh and self.target is not None and not self.is_soft

    @property
    def is_soft(self) -> bool:
        """Targets that are probabilities: rows weigh the same."""
        return (
            self.kind.weigh is CLASSES.weigh and self.target is not None and self.target.is_floating_point()
        )

    @property
    def ignored(self) -> int:
        """The target that does not count."""
        return int(self.settings.get("ignore_index", -100))

    def weigh(self, target: Tensor) -> Number:
        """The weight of other targets under the same settings."""
        return self.kind.weigh(self.settings, (), (target,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """One reduction of many losses to one number.

    Attributes:
        name: the function that was called.
        value: what the model got.
        node: the place of the value in autograd's graph.
        total: the same losses summed; None where the mean is to be multiplied again.
        weight: what the sum is divided by.
        is_sum: the model asked for the sum itself.
        source: the place of what was reduced in autograd's graph; None for losses that are counted.
        origin: what the weight is counted from.
        pairs_rows: the target of row i is class i of as many classes: rows are each other's classes.
    """

    name: str
    value: Tensor
    node: Node | None
    total: Tensor | None
    weight: Number
    is_sum: bool
    source: Node | None
    origin: Origin
    pairs_rows: bool = False

    @property
    def sum(self) -> Tensor:
        """The losses summed."""
        return widened(self.value) * self.weight if self.total is None else self.total


class Watch(TorchFunctionMode):
    """While it is entered, notes every call that reduces losses to one number.

    Each noted call is made with the sum in place of the mean, and the model gets that sum over its weight:
    the kernels, and casts before them, are the model's own. A mean of nothing is 0, not NaN, because another
    micro-batch may have something. Calls inside a call are not noted, nor those with `reduction="none"`.

    Args:
        as_is: leave every value as the model computes it, to the bit.

    Attributes:
        found: what was noted, in order.

    Example:
        >>> scores, target = torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
        >>> with Watch() as watch:
        ...     loss = torch.nn.functional.cross_entropy(scores, target)
        >>> [(one.name, int(one.weight)) for one in watch.found]
        [('cross_entropy', 2)]
    """

    def __init__(self, *, as_is: bool = False) -> None:
        super().__init__()
        self.found: list[Reduction] = []
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
        return self._mean(func(*args, **kwargs), args, kwargs)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        bound = _signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        kind, settings = FUNCTIONS[func], dict(bound.arguments)
        if settings["reduction"] not in kind.reductions or _is_unusual(settings):
            return func(*args, **kwargs)
        if settings.get("weight") is not None:
            kind = WEIGHTED_FUNCTIONS.get(func, kind)

        def call(reduction: str) -> Tensor:
            bound.arguments["reduction"] = reduction
            return func(*bound.args, **bound.kwargs)

        read = _read_as_is if self._as_is else _read
        return self._note(read(func.__name__, kind, settings, call))

    def _mean(self, value: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """A mean over all elements. The value stays the model's own: bodies take means too."""
        given: Any = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or not given.dim() or value.dim() or self._is_of_losses(given):
            return value
        count = given.numel()
        noted = Reduction(
            name="mean",
            value=value,
            node=value.grad_fn,
            # Taken from the mean, when asked for: a sum might not fit in float16, and a checkpointed body
            # that takes a mean must do nothing now that it would not do when it runs again, unwatched.
            total=None if count else given.sum(),
            weight=count,
            is_sum=False,
            source=given.grad_fn,
            origin=Origin(kind=_ELEMENTS, settings={}, target=None, axis=given.shape[0]),
        )
        return self._note(noted)

    def _is_of_losses(self, given: Tensor) -> bool:
        """Whether a mean is one of losses already reduced, as in `torch.stack(losses).mean()`."""
        noted = {one.node for one in self.found}
        nodes = [given.grad_fn] if self.found and given.grad_fn is not None else []
        ends: list[Node] = []
        for node in nodes:  # which grows meanwhile
            if node in noted:
                ends.append(node)
            elif len(nodes) > _NEAR or hasattr(node, "variable"):
                return False
            else:
                nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]
        return bool(ends)

    def _note(self, noted: Reduction) -> Tensor:
        self.found.append(noted)
        return noted.value.clone()  # models add to a loss in place


def _read(name: str, kind: Kind, settings: Mapping[str, Any], call: Callable[[str], Tensor]) -> Reduction:
    """Sum in place of the reduction that was asked for, at least in float32."""
    arguments, target = _arguments(kind, settings)
    is_sum = settings["reduction"] == "sum"
    source, axis, count = None, 0, 0
    if kind.counted and arguments[0].dtype not in SHORT_DTYPES:
        losses = total = call("sum")  # one kernel
    else:
        losses = call("none")
        source, axis, count = losses.grad_fn, losses.shape[0] if losses.dim() else 1, losses.numel()
        terms = losses if is_sum else kind.terms(losses, arguments)
        total = terms.sum(dtype=torch.float32 if losses.dtype in SHORT_DTYPES else None)
    weight: Number = axis if settings["reduction"] == "batchmean" else count
    if kind.counted:
        weight = kind.weigh(settings, arguments, (target,))
    weight = 1 if is_sum else weight
    value = _divided(total, weight).to(losses.dtype)
    classes = _classes(arguments) if kind.weigh is CLASSES.weigh else 0
    origin = Origin(kind=kind, settings=_kept(settings), target=target, axis=axis, classes=classes)
    return Reduction(
        name=name,
        value=value,
        node=value.grad_fn,
        total=total,
        weight=weight,
        is_sum=is_sum,
        source=source,
        origin=origin,
        pairs_rows=kind.counted and _pairs_rows(arguments[0], target),
    )


def _read_as_is(
    name: str, kind: Kind, settings: Mapping[str, Any], call: Callable[[str], Tensor]
) -> Reduction:
    """The model's own value, to the bit."""
    arguments, target = _arguments(kind, settings)
    reduction = settings["reduction"]
    weight: Number = 1
    if reduction != "sum":
        rows = reduction == "batchmean"
        tensors = tuple(one for one in arguments if isinstance(one, Tensor))  # a variance may be a number
        weight = arguments[0].shape[0] if rows else kind.weigh(settings, tensors, (target,))
    value = call(reduction)
    origin = Origin(kind=kind, settings=_kept(settings), target=target, axis=0)
    return Reduction(
        name=name,
        value=value,
        node=value.grad_fn,
        total=value,
        weight=weight,
        is_sum=reduction == "sum",
        source=None,
        origin=origin,
    )


def folds_rows(source: Node | None) -> bool:
    """Whether what is reduced was itself folded along its first axis, close by: then rows have met already.

    Example:
        >>> outputs = torch.ones(4, 3, requires_grad=True)
        >>> folds_rows((outputs * 2).mean(0).square().grad_fn), folds_rows(outputs.mean(1).square().grad_fn)
        (True, False)
    """
    return any(node.name().rstrip("0123456789") in _FOLDS and _takes_first(node) for node in _near(source))


def selects(source: Node | None) -> bool:
    """Whether what is reduced was picked out by a mask or an index, close by, so that it has any length.

    Example:
        >>> losses = torch.ones(4, requires_grad=True)
        >>> selects(losses[torch.tensor([True, False, True, True])].grad_fn), selects(losses.exp().grad_fn)
        (True, False)
    """
    return any(node.name().startswith(_SELECTS) for node in _near(source))


def compares_rows(source: Node | None, rows: int) -> bool:
    """Whether every row was multiplied with every other, close by, as contrastive losses do.

    Example:
        >>> one, other = torch.ones(4, 3, requires_grad=True) * 1, torch.ones(4, 3, requires_grad=True) * 2
        >>> compares_rows((one @ other.T).sigmoid().grad_fn, 4), compares_rows((one * other).grad_fn, 4)
        (True, False)
    """
    return any(node.name() == "MmBackward0" and _is_square(node, rows) for node in _near(source))


def widened(value: Tensor) -> Tensor:
    """In float64, where a coefficient times 1 / weight rounds once, at the end, as torch's own mean does.

    Example:
        >>> widened(torch.ones((), dtype=torch.float32)).dtype
        torch.float64
    """
    return value.float() if value.device.type == "mps" else value.double()  # the one device without it


def _near(source: Node | None) -> list[Node]:
    nodes = [] if source is None else [source]
    for node in nodes:  # which grows meanwhile
        fresh = [one for one, _ in node.next_functions if one is not None and one not in nodes]
        nodes += fresh[: max(0, _NEAR - len(nodes))]
    return nodes


def _takes_first(node: Any) -> bool:
    """Whether a fold takes the first axis, of something that is no parameter."""
    if any(hasattr(one, "variable") for one, _ in node.next_functions):
        return False
    dims: Any = getattr(node, "_saved_dim", ())
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    size = len(getattr(node, "_saved_self_sym_sizes", ())) or len(
        getattr(node, "_saved_self", torch.ones(1)).shape
    )
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]  # as torch hands negative ones out
    return not dims or any(dim % size == 0 for dim in signed)


def _is_square(product: Any, rows: int) -> bool:
    """Whether a matrix product of two activations has one row and one column for each row."""
    height, width = product._saved_self_sym_sizes[0], product._saved_mat2_sym_sizes[1]
    other = product.next_functions[1][0]
    while other is not None and other.name() in _TURNS:
        other = other.next_functions[0][0]
    return height == width and height % rows == 0 and not hasattr(other, "variable")


def _divided(total: Tensor, weight: Number) -> Tensor:
    """0 where there is nothing to divide by."""
    if isinstance(weight, Tensor):
        return total / torch.where(weight == 0, 1, weight)
    return total / (weight or 1)


def _arguments(kind: Kind, settings: Mapping[str, Any]) -> tuple[tuple[Any, ...], Tensor | None]:
    arguments = tuple(settings.values())[: kind.arguments]
    last = arguments[-1]
    return arguments, last if isinstance(last, Tensor) else None


def _classes(arguments: tuple[Any, ...]) -> int:
    """The classes of scores (rows, classes, ...) or (classes,), or of a layer (classes, width)."""
    if len(arguments) == 3:
        return arguments[1].shape[0]
    return arguments[0].shape[1 if arguments[0].dim() > 1 else 0]


def _pairs_rows(scores: Tensor, target: Tensor | None) -> bool:
    if target is None or target.dim() != 1 or scores.shape != (len(target), len(target)):
        return False
    return torch.equal(target, torch.arange(len(target), device=target.device, dtype=target.dtype))


def _kept(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: settings[name] for name in ("ignore_index", "weight") if name in settings}


def _is_unusual(settings: Mapping[str, Any]) -> bool:
    """Deprecated reductions, and weights that are trained: these stay as they are, and are refused later."""
    weights = [settings.get(name) for name in ("weight", "pos_weight")]
    trained = any(isinstance(weight, Tensor) and weight.requires_grad for weight in weights)
    return trained or any(settings.get(name) is not None for name in ("size_average", "reduce"))


@cache
def _signature(function: Callable[..., Tensor]) -> Signature:
    return signature(function)
