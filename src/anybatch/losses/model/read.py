"""A model's loss read from autograd's graph: torch keeps there what a mean was divided by."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from anybatch.core import SHORT_DTYPES
from anybatch.core import torch_private as private
from anybatch.losses.loss import EvaluateAgain
from anybatch.losses.model.graph import Found
from anybatch.losses.model.intercept import Origin, Reduction, classes_in, is_equal, pairs_rows, widened

WATCH_EVERY = 64  # steps
TRIES = 3  # models whose loss changes its form all the time are watched in every step

_MEAN = "MeanBackward0"  # which saves sizes only
_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")

# The node that each function leaves for a mean, and the settings that are saved in it. Others that would
# matter leave another node.
_NODES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mean": ((_MEAN,), ()),
    "cross_entropy": (_CLASSES, ("weight", "ignore_index")),
    "nll_loss": (_CLASSES, ("weight", "ignore_index")),
    "mse_loss": (("MseLossBackward0",), ()),
    "smooth_l1_loss": (("SmoothL1LossBackward0",), ("beta",)),
    "huber_loss": (("HuberLossBackward0",), ("delta",)),
    "binary_cross_entropy_with_logits": (
        ("BinaryCrossEntropyWithLogitsBackward0",),
        ("weight", "pos_weight"),
    ),
}
_MEAN_REDUCTION = 1  # as torch numbers them
_MOST_COUNTED = 2**24  # targets: torch counts them in the dtype of the scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """The form of a loss that is one mean and nothing else, as it was seen while a model was watched.

    Attributes:
        term: the mean, without graph.
        before: the name of the node before a plain mean.
        padded: whether the model padded labels.
    """

    term: Reduction
    before: str
    padded: bool

    def read(self, loss: Tensor) -> Reduction:
        """The same mean in another forward.

        Args:
            loss: what the model returned.

        Raises:
            EvaluateAgain: it has another form, or does not show it.
        """
        node: Any = loss.grad_fn
        nodes, names = _NODES[self.term.name]
        if type(loss) is not Tensor or loss.dtype in SHORT_DTYPES or node.name() not in nodes:
            raise EvaluateAgain
        return self._read_mean(loss, node) if nodes == (_MEAN,) else self._read_loss(loss, node, names)

    def _read_mean(self, loss: Tensor, node: Any) -> Reduction:
        source, shape = node.next_functions[0][0], private.saved(node, "self_sym_sizes")
        if shape is None or _name_of(source) != self.before:
            raise EvaluateAgain
        return self._term(loss, source, shape)

    def _read_loss(self, loss: Tensor, node: Any, names: tuple[str, ...]) -> Reduction:
        fixed = self.term.fixed
        if private.is_packed(node, "self") or private.saved(node, "reduction") != _MEAN_REDUCTION:
            raise EvaluateAgain
        if not all(is_equal(_setting(node, name), fixed[name]) for name in names if name in fixed):
            raise EvaluateAgain
        scores, target = private.saved(node, "self"), private.saved(node, "target")
        if not self.term.origin.counts_classes:
            return self._term(loss, node, tuple(scores.shape))
        if target.numel() > _MOST_COUNTED:
            raise EvaluateAgain
        return self._term(
            loss, None, (), scores=scores, target=target, weight=private.saved(node, "total_weight")
        )

    def _term(
        self,
        loss: Tensor,
        source: Node | None,
        shape: tuple[int, ...],
        *,
        scores: Tensor | None = None,
        target: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Reduction:
        old, summed, counted = self.term, None, torch.Size(shape).numel()
        if weight is not None and weight.device.type == "cpu":  # no device has to stop for it
            counted = weight.item() if old.fixed["weight"] is not None else int(weight)
            summed = None if counted else widened(loss).nan_to_num(0.0)  # a mean of nothing is NaN
        elif weight is not None:
            counted = weight
        origin = Origin(
            kind=old.origin.kind,
            settings=old.origin.settings,
            target=target,
            axis=shape[0] if shape else 0,
            classes=0 if scores is None else classes_in((scores,)),
        )
        return Reduction(
            name=old.name,
            value=loss,
            node=loss.grad_fn,
            total=summed,
            weight=counted,
            is_sum=False,
            source=source,
            origin=origin,
            fixed=old.fixed,
            pairs_rows=scores is not None and pairs_rows(scores, target),
            shape=shape,
        )


class Reading:
    """How the loss of one model is read: watched in a first step, and every 64th, read in those between.

    Example:
        >>> reading = Reading()
        >>> reading.begin() is None
        True
    """

    def __init__(self) -> None:
        self._form: Form | None = None
        self._steps, self._misses = 0, 0

    def begin(self) -> Form | None:
        """What the next step reads by; None where it is watched."""
        if self._form is not None and self._steps >= WATCH_EVERY:
            self._form, self._misses = None, 0
        self._steps += 1
        return self._form

    def learn(self, model: nn.Module, found: Found) -> None:
        """Note the form of a loss that was watched, if it can be read."""
        form = form_of(found) if self._misses < TRIES else None
        # What is read costs a rounding of one number in the dtype of the loss. Nobody asked for it where the
        # model computes in a wider one.
        if form is not None and any(
            p.dtype.itemsize > form.term.value.dtype.itemsize for p in model.parameters()
        ):
            form = None
        self._form = form
        self._steps = 1

    def miss(self) -> None:
        """It had another form: the next step is watched."""
        self._form, self._misses = None, self._misses + 1


def reading_of(model: nn.Module) -> Reading | None:
    """How the loss of a model is read; None while only shapes are computed, which show nothing.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> reading_of(model) is reading_of(model)
        True
    """
    return _READINGS.setdefault(model, Reading()) if type(torch.empty(0)) is Tensor else None


# By the model, not in it: copies and pickles of a model, and of the caller's loss, know nothing of it.
_READINGS: WeakKeyDictionary[nn.Module, Reading] = WeakKeyDictionary()


def form_of(found: Found) -> Form | None:
    """The form of a loss that was watched; None if it is not one mean that can be read.

    Example:
        >>> form_of(Found(terms={}, routers={}, factors={}, leaves={}, rows=3, divides=False, padded=False))
    """
    if found.factors != {"loss": 1.0} or found.divides or not found.terms:
        return None
    (one,) = found.terms.values()
    if one.name not in _NODES or one.is_sum or one.runs_again or one.value.dtype in SHORT_DTYPES:
        return None
    kept, (_, names) = one.forgotten(), _NODES[one.name]
    if one.origin.kind.counted and not one.origin.counts_classes:  # soft targets, a weight for each element
        return None
    others = [value for name, value in one.origin.settings.items() if name not in names]
    if any(isinstance(value, Tensor) or value for value in others):  # label smoothing is several nodes
        return None
    weight = kept.fixed.get("weight")
    if one.origin.counts_classes and weight is not None and not bool((weight > 0).all()):
        return None  # a mean over valid targets may be 0 / 0
    target = one.origin.target
    origin = replace(
        one.origin,
        settings={**one.origin.settings, **kept.fixed},  # as they are now
        target=None if target is None else target.new_empty(0),  # no rows are kept, only what kind they are
    )
    return Form(term=replace(kept, origin=origin), before=_name_of(one.source), padded=found.padded)


def _name_of(node: Any) -> str:
    return "" if node is None else node.name()


def _setting(node: Any, name: str) -> Any:
    value = private.saved(node, name)
    # Torch shows negative numbers as unsigned ones.
    return value - 2**64 if type(value) is int and value >= 2**63 else value
