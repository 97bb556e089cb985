"""A mean cross-entropy read from autograd's graph, where torch saves its divisor and its targets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anybatch.core import Number, torch_private as private
from anybatch.losses.model.graph import LossTerms
from anybatch.losses.model.intercept import Reduction, classes_in, pairs_rows
from anybatch.losses.model.targets import rows_of

_NODES = ("NllLossBackward0", "NllLoss2DBackward0")
_MEAN = 1  # torch's number of this reduction
_MOST_COUNTED = 2**24  # targets: torch counts them in the dtype of the scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """The form of a model's loss that is one mean over classes, learned while the model was watched."""

    term: Reduction  # without graph and rows
    padded: bool  # True if the model padded labels

    def weigh(self, loss: Tensor) -> Number | None:
        """Return the divisor of another forward's mean; None if the loss has another form.

        It is a tensor if reading it needs a synchronization.
        """
        node: Any = loss.grad_fn
        if type(loss) is not Tensor or node is None or node.name() not in _NODES:
            return None
        if private.is_packed(node, "self") or private.saved(node, "reduction") != _MEAN:
            return None
        ignored = private.saved(node, "ignore_index")
        ignored -= 2**64 * (ignored >= 2**63)  # torch returns negative numbers as unsigned ones
        known = self.term.value.dtype, self.term.origin.ignored
        if private.saved(node, "weight") is not None or (loss.dtype, ignored) != known:
            return None
        if private.saved(node, "target").numel() > _MOST_COUNTED:
            return None
        total = private.saved(node, "total_weight")
        return int(total) if total.device.type == "cpu" else total

    def read(self, loss: Tensor, weight: Number, leaves: Mapping[str, Tensor]) -> LossTerms:
        """Return the terms of another forward, as if the model had been watched."""
        scores, target = private.saved(loss.grad_fn, "self"), private.saved(loss.grad_fn, "target")
        origin = replace(self.term.origin, target=target, classes=classes_in((scores,)))
        term = replace(
            self.term,
            value=loss,
            node=loss.grad_fn,
            weight=weight,
            origin=origin,
            pairs_rows=pairs_rows(scores, target),
        )
        return LossTerms(
            terms={"loss": term},
            routers={},
            factors={"loss": 1.0},
            leaves=leaves,
            rows=rows_of(leaves.values()),
            divides=False,
            padded=self.padded,
        )


# Outside of the model, so that copies and pickles of models and losses do not contain it.
_FORMS: WeakKeyDictionary[nn.Module, Form] = WeakKeyDictionary()


def known_form(model: nn.Module) -> Form | None:
    """Return the form of a model's loss; None if it must be watched."""
    return None if _is_fake() else _FORMS.get(model)


def forget_form(model: nn.Module) -> None:
    """Forget the form of a loss that has another one now, so that the model is watched."""
    _FORMS.pop(model, None)


def learn_form(model: nn.Module, found: LossTerms) -> None:
    """Store the form of a watched loss, if it can be read."""
    one = found.terms.get("loss")
    is_single = (
        one is not None and found.factors == {"loss": 1.0} and not found.divides and found.constant is None
    )
    if one is None or not is_single or not one.is_readable or _is_fake():
        return
    target = None if one.origin.target is None else one.origin.target.new_empty(0)
    term = replace(one.forgotten(), origin=replace(one.origin, target=target))
    _FORMS[model] = Form(term=term, padded=found.padded)


def _is_fake() -> bool:
    return type(torch.empty(0)) is not Tensor  # a fake holds no divisor
