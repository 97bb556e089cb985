"""Losses of a user's own: totals by name, with coefficients, each with its own weight."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Additive, PerRow, Terms, Total
from tests.laws.cases import Case
from tests.laws.check import stack
from tests.laws.draw import CLASSES, FEATURES, Draw
from tests.zoo import two_heads

COEFFICIENTS = {"size": 0.01, "spread": -0.3, "right": 0.0}


def batch(draw: Draw) -> Any:
    return {"x": draw.normal(4, FEATURES), "labels": draw.classes(4), "value": draw.normal()}


def tokens(model: nn.Module, micro: Any) -> Total:
    """Cross-entropy over valid places."""
    scores, labels = model(micro["x"])[0].transpose(1, 2), micro["labels"]
    return Total(F.cross_entropy(scores, labels, reduction="sum"), (labels != -100).sum())


def named(model: nn.Module, micro: Any) -> Mapping[str, Total]:
    """Terms weighed by valid places, by rows, by all places; the last one carries no gradient."""
    scores, value = model(micro["x"])
    labels, rows = micro["labels"], len(value)
    valid = labels != -100
    entropy = -(scores.softmax(-1) * scores.log_softmax(-1)).sum()
    return {
        "tokens": tokens(model, micro),
        "size": Total(sum(p.square().sum() for p in model.parameters()) * rows, rows),
        "spread": Total(entropy, labels.numel()),
        "fit": Total((value - micro["value"]).square().sum(), float(rows)),
        "right": Total(((scores.argmax(-1) == labels) & valid).sum().item(), int(valid.sum())),
    }


def weigh_tokens(whole: Any) -> Tensor:
    return (_together(whole)["labels"] != -100).sum()


def weigh_named(whole: Any) -> Mapping[str, Any]:
    labels = _together(whole)["labels"]
    valid, rows = (labels != -100).sum(), len(labels)
    fixed = {"size": rows, "spread": labels.numel(), "fit": float(rows)}
    return {"tokens": valid, **fixed, "right": valid.item()}


def often_nothing(model: nn.Module, micro: Any) -> Mapping[str, Total]:
    """Terms that many a micro-batch, even the first, has nothing to add to; and one that nobody has."""
    scores, value = model(micro["x"])
    fit = Total((value - micro["value"]).square().sum(), len(value))
    valid = micro["labels"] != -100
    few = tokens(model, micro) if valid.any() else Total.zero()
    return {"few": few, "fit": fit, "none": Total((scores * 0).sum(), 0)}


def often_nothing_weigh(whole: Any) -> Mapping[str, Any]:
    return {"few": weigh_tokens(whole), "fit": len(_together(whole)["value"]), "none": 0}


def masked(scores: Tensor, value: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each place, and which of them are valid; for an ab.PerRow."""
    losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    return losses + value[:, None].square(), labels != -100


def sixteenth(model: nn.Module, micro: Any) -> Tensor:
    """Losses that are divided by a constant; for an ab.Additive."""
    return F.cross_entropy(model(micro["x"])[0].transpose(1, 2), micro["labels"], reduction="sum") / 16


def _together(whole: Any) -> Any:
    """The batch as it was given to the step is a list of samples where these are collated."""
    return stack(whole) if isinstance(whole, list) else whole


def _case(name: str, forms: Mapping[str, Any]) -> Case:
    made = {form: lambda loss=loss: loss for form, loss in forms.items()}
    model = lambda: two_heads(CLASSES, features=FEATURES)  # noqa: E731
    return Case(name=name, forms=made, options={}, model=model, batch=batch)


# "weighed" says the weights of the batch beforehand and divides early, the others divide late.
NAMED = {"terms": Terms(named, COEFFICIENTS), "weighed": Terms(named, COEFFICIENTS, weigh_named)}
OFTEN = {"function": often_nothing, "weighed": Terms(often_nothing, weight=often_nothing_weigh)}
TOTALS = [
    _case("total", {"function": tokens, "weighed": Terms(tokens, weight=weigh_tokens)}),
    _case("named", {**NAMED, "function": named}),
    _case("often-nothing", OFTEN),
    replace(
        _case("wrapped", {"per row": PerRow(masked), "additive": Additive(sixteenth)}),
        batch=lambda draw: {name: value for name, value in batch(draw).items() if name != "value"},
    ),
]
