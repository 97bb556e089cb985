"""A model's loss read from autograd's graph, where torch saves the divisor of a mean."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anybatch.core import SHORT_DTYPES, Number, torch_private as private
from anybatch.integrations import homes
from anybatch.losses.loss import EvaluateAgain
from anybatch.losses.model.graph import LossTerms
from anybatch.losses.model.intercept import Reduction, classes_in, is_equal, pairs_rows, widened

WATCH_EVERY = 64  # steps
TRIES = 3  # after this many misses a model is watched in every step

_MEAN = "MeanBackward0"  # saves sizes only
_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")

# The node of each function for a mean, and the settings that it saves. Other settings change the node.
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
    """The form of a loss that is a single mean, recorded while the model was watched."""

    term: Reduction  # the mean, without graph
    before: str  # the name of the node before a plain mean; empty for losses
    padded: bool  # True if the model padded labels

    def weigh(self, loss: Tensor) -> Number:
        """Return the divisor of another forward's mean; a tensor if reading it needs a synchronization."""
        node: Any = loss.grad_fn
        nodes, names = _NODES[self.term.name]
        if type(loss) is not Tensor or loss.dtype != self.term.value.dtype or _name_of(node) not in nodes:
            raise EvaluateAgain
        if nodes == (_MEAN,):
            shape = private.saved(node, "self_sym_sizes")
            if shape is None or _name_of(node.next_functions[0][0]) != self.before:
                raise EvaluateAgain
            return torch.Size(shape).numel()
        if private.is_packed(node, "self") or private.saved(node, "reduction") != _MEAN_REDUCTION:
            raise EvaluateAgain
        fixed = self.term.fixed
        if not all(is_equal(_setting(node, name), fixed[name]) for name in names if name in fixed):
            raise EvaluateAgain
        if not self.term.origin.counts_classes:
            return private.saved(node, "self").numel()
        if private.saved(node, "target").numel() > _MOST_COUNTED:
            raise EvaluateAgain
        total = private.saved(node, "total_weight")
        if total.device.type != "cpu":
            return total
        return int(total) if fixed["weight"] is None else total.item()

    def read(self, loss: Tensor) -> Reduction:
        """Return the mean in another forward of this form, as if the model had been watched."""
        weight, old = self.weigh(loss), self.term
        node: Any = loss.grad_fn
        source, shape, target, classes, pairs = node, (), None, 0, False
        if old.origin.counts_classes:
            scores, target, source = private.saved(node, "self"), private.saved(node, "target"), None
            classes, pairs = classes_in((scores,)), pairs_rows(scores, target)
        elif self.before:
            source, shape = node.next_functions[0][0], tuple(private.saved(node, "self_sym_sizes"))
        else:
            shape = tuple(private.saved(node, "self").shape)
        return replace(
            old,
            value=loss,
            node=node,
            total=sum_of(loss, weight),
            weight=weight,
            source=source,
            origin=replace(old.origin, target=target, classes=classes),
            pairs_rows=pairs,
            shape=shape,
            picks=False,
            may_be_parameters=False,
        )


class LossReading:
    """The state of reading a model's loss: watched in the first step and every 64th, else read."""

    def __init__(self, *, learns: bool = True) -> None:
        self.learns = learns
        self.form: Form | None = None  # the last one, also while the model is watched
        self._files: list[ModuleType] | None = None
        self._form: Form | None = None
        self._steps, self._misses = 0, 0

    def begin(self) -> Form | None:
        """Return the form for the next step; None if the model is watched."""
        if self._form is not None and self._steps >= WATCH_EVERY:
            self._form, self._misses = None, 0
        if self._form is None:
            self._files = None
        self._steps += 1
        return self._form

    def files_of(self, model: nn.Module) -> list[ModuleType]:
        """Return the modules that define a router loss, as found when the model was last watched."""
        if self._files is None:
            self._files = homes(model)
        return self._files

    def learn(self, model: nn.Module, found: LossTerms) -> None:
        """Store the form of a watched loss, if it can be read."""
        if not self.learns:
            return
        form = form_of(found) if self._misses < TRIES else None
        # Reading rounds one number in the dtype of the loss; not acceptable if parameters are wider.
        if form is not None and any(
            p.dtype.itemsize > form.term.value.dtype.itemsize for p in model.parameters()
        ):
            form = None
        self._form = self.form = form
        self._steps = 1

    def miss(self) -> None:
        """Discard the form after a mismatch; the next step is watched."""
        self._form = self.form = None
        self._misses += 1


def reading_of(model: nn.Module) -> LossReading:
    """Return the reading state of a model; under fake tensors a new one that learns nothing."""
    shapes_only = type(torch.empty(0)) is not Tensor
    return LossReading(learns=False) if shapes_only else _READINGS.setdefault(model, LossReading())


@contextmanager
def read_afresh(model: nn.Module) -> Generator[None]:
    """Return a context after which the learned form of a model's loss is as before.

    If none was learned before, the next step is watched, and rounds as the form that was learned inside.
    """
    known = _READINGS.pop(model, None)
    try:
        yield
    finally:
        found = _READINGS.pop(model, None)
        if known is None and found is not None:
            known = LossReading()
            known.form = found.form
        if known is not None:
            _READINGS[model] = known


# Outside of the model, so that copies and pickles of models and losses do not contain it.
_READINGS: WeakKeyDictionary[nn.Module, LossReading] = WeakKeyDictionary()


def form_of(found: LossTerms) -> Form | None:
    """Return the form of a watched loss; None if it is not a single mean that can be read."""
    if found.factors != {"loss": 1.0} or found.divides or not found.terms:
        return None
    (one,) = found.terms.values()
    if one.name not in _NODES or one.is_sum or one.runs_again or one.value.dtype in SHORT_DTYPES:
        return None
    kept, (_, names) = one.forgotten(), _NODES[one.name]
    if one.origin.kind.counted and not one.origin.counts_classes:  # soft targets, a weight for each element
        return None
    others = [value for name, value in one.origin.settings.items() if name not in names]
    if any(isinstance(value, Tensor) or value for value in others):  # label smoothing has several nodes
        return None
    weight = kept.fixed.get("weight")
    if one.origin.counts_classes and weight is not None and not bool((weight > 0).all()):
        return None  # a mean over valid targets may be 0 / 0
    target = one.origin.target
    origin = replace(
        one.origin,
        settings={**one.origin.settings, **kept.fixed},  # a snapshot
        target=None if target is None else target.new_empty(0),  # keeps dtype and device, no rows
    )
    before = _name_of(one.source) if one.name == "mean" else ""
    return Form(term=replace(kept, origin=origin), before=before, padded=found.padded)


def sum_of(loss: Tensor, weight: Number) -> Tensor:
    """Return mean times weight, with the graph; 0 for the mean of nothing, which is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0, widened(loss) * weight)
    return widened(loss) * weight if weight else widened(loss).nan_to_num(0.0)


def _name_of(node: Any) -> str:
    return "" if node is None else node.name()


def _setting(node: Any, name: str) -> Any:
    value = private.saved(node, name)
    # Torch returns negative numbers as unsigned ones.
    return value - 2**64 if type(value) is int and value >= 2**63 else value
