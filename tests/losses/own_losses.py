"""Small models that compute their own loss, in the ways people write them."""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo import Perceptron

ROWS, LENGTH, CLASSES = 7, 3, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, LENGTH, 2, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (ROWS, LENGTH), generator=GENERATOR)
LABELS[torch.rand(ROWS, LENGTH, generator=GENERATOR) < 0.4] = -100
LABELS[2:4] = -100  # a micro-batch of two without a single valid target
BATCH = {"x": X, "labels": LABELS}
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


class Own(nn.Module):
    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.loss = Perceptron(2, CLASSES).double(), loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.scores(x), labels)


again = partial(checkpoint, use_reentrant=False)


def whole_of(model: nn.Module, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole batch at once; the model has no gradient before and after."""
    model.zero_grad()
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    output = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
    value = output[-1] if isinstance(output, tuple | list) else output
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.item(), gradients


def tokens(scores: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **settings)


def size(scores: Tensor) -> Tensor:
    return scores.square().mean()


def in_place(scores: Tensor, labels: Tensor) -> Tensor:
    loss = tokens(scores, labels)
    loss += 0.3 * size(scores)
    return loss


def stacked(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([tokens(scores, labels), size(scores), tokens(-scores, labels)]).mean()


def summed(scores: Tensor, labels: Tensor) -> Tensor:
    return tokens(scores, labels, reduction="sum")


def or_nothing(scores: Tensor, labels: Tensor) -> Tensor:
    """A constant where every row is ignored, as some heads return."""
    return tokens(scores, labels) if (labels >= 0).any() else torch.tensor(0.0)


def binary(scores: Tensor, **settings: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, 0.25), **settings)


def error(outputs: Tensor) -> Tensor:
    return F.mse_loss(outputs, torch.ones_like(outputs))


def pairs(scores: Tensor) -> Tensor:
    return scores.flatten(1) @ scores.flatten(1).T


#: Losses that are exact in every cut, by how they are returned.
EXACT: dict[str, Callable[..., Any]] = {
    "scalar": tokens,
    "mapping": lambda s, y: {"loss": tokens(s, y), "scores": s},
    "attribute": lambda s, y: SimpleNamespace(loss=tokens(s, y)),
    "tuple with the loss last": lambda s, y: (s, tokens(s, y)),
    "in place": in_place,
    "stack": stacked,
    "masked mean": lambda s, y: (s.square().sum(-1) * (y >= 0)).mean(),
    "a mean in the body": lambda s, y: tokens(s - s.detach().mean() * 0, y),
    # A mean in a part of the body that runs again in the backward, where nobody watches.
    "checkpointed": lambda s, y: tokens(again(lambda x: x.sin() + 0 * x.mean(), s), y),
    "in a checkpoint, even without a valid target": lambda s, y: again(tokens, s, y),
    "or nothing": or_nothing,
    "sum": summed,
    "sum and mean": lambda s, y: summed(s, y) + size(s),
    "class weights": lambda s, y: tokens(s, y, weight=WEIGHTS, label_smoothing=0.1),
    "labels made inside": lambda s, y: tokens(s, (y + 1).clamp(0, CLASSES - 1)),
    "axes in another order": lambda s, y: s.movedim(0, 2).square().mean(),
    "one of each row": lambda s, y: error(s[torch.arange(len(s)), y.argmax(1)]),
    "sums": lambda s, y: F.mse_loss(s, s.detach() + 1, reduction="sum") - 0.5 * torch.sum(1 - s.square()),
    "weight for every element": lambda s, y: binary(s, weight=(y >= 0)[..., None].expand_as(s).double()),
    "next token": lambda s, y: tokens(s[:, :-1], y[:, 1:]),
    "means as they are written": lambda s, y: (
        torch.mean(input=s.square()) + torch.mean(s.sin()) + s.cos().mean(dim=(0, 1, 2))
    ),
    "sums as they are written": lambda s, y: torch.sum(s.sin()) + s.square().sum((0, 1, 2)),
}

MET = "elements from . rows .* rows have met before it"
UNLIKE = "the same loss and gradient from Own"
LOOP = "Of a loop over rows, or a branch such as `if mask.any\\(\\)`"

#: Losses that are refused, with what the message names.
#: On a device a single term is divided last, so that this is exact there.
MASKED = "labels masked inside"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "own division": (
        lambda s, y: (s.square().sum(-1) * (y >= 0)).sum() / (y >= 0).sum(),
        "Own to be made of means .* a sum that is divided afterwards, .* in sum",
    ),
    "own norm": (lambda s, y: s.norm(), "Own to reach its parameters only .* 'scores.layers"),
    "product": (lambda s, y: size(s) * tokens(s, y), "constant factors"),
    "scaled sum": (lambda s, y: summed(s, y) / len(y), "a sum that is divided"),
    "factor of the rows": (lambda s, y: size(s) * (1 + y.sum()), "same factors"),
    "folded rows": (lambda s, y: s.mean(0).square().mean(), MET),
    "sum of folded rows": (lambda s, y: s.mean(0).square().sum(), UNLIKE),
    "balance": (lambda s, y: tokens(s, y) + s.softmax(-1).mean((0, 1)).square().mean(), MET),
    "loop over rows": (lambda s, y: torch.stack([*map(F.cross_entropy, s, y.clamp(min=0))]).mean(), LOOP),
    "weights of the rows at hand": (
        lambda s, y: tokens(s, y, weight=y.clamp(min=0).flatten().bincount(minlength=CLASSES).double()),
        "settings of cross_entropy in Own to be the same .* weight = ",
    ),
    "positive weight of the rows at hand": (
        lambda s, y: binary(s[..., 0], pos_weight=(y < 2).sum() / (y > 1).sum()),
        "settings of binary_cross_entropy_with_logits in Own .* pos_weight = ",
    ),
    MASKED: (
        lambda s, y: tokens(s, y.masked_fill(y == 1, -100)),
        "the batch's 9 for 'loss', got 7.* If the model makes its own targets, bring",
    ),
    "contrast": (lambda s, y: F.cross_entropy(pairs(s), torch.arange(len(s))), "contrastive"),
    "nothing": (lambda s, y: {"scores": s}, "Own to return its loss"),
    "no scalar": (lambda s, y: F.mse_loss(s, s * 0, reduction="none"), r"shape \(\d, 3, 4\)"),
    "two scalars": (lambda s, y: (size(s), tokens(s, y)), "2 scalars with gradient"),
}


class Layer(Own):
    """A linear layer and a loss of it, its input and the labels, in which parameters stand beside rows."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__(loss)
        self.scores = nn.Linear(2, CLASSES).double()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.scores.weight, self.scores(x), x, labels)


#: Losses with parameters in them that are exact: what looks like rows that meet is none.
WITH_PARAMETERS: dict[str, Callable[..., Tensor]] = {
    "mean of parameters": lambda weight, s, x, y: tokens(s, y) + 0.1 * size(weight),
    "mean loss of parameters": lambda weight, s, x, y: tokens(s, y) + 0.1 * error(weight),
    "columns of one length": lambda weight, s, x, y: error(x @ (weight / weight.norm(dim=0)).T),
    "centred prototypes": lambda weight, s, x, y: error(x @ (weight - weight.mean(0)).T),
    "merged weights": lambda weight, s, x, y: error(x @ (weight.T @ weight)),
    "time first": lambda weight, s, x, y: error(s.transpose(0, 1).mean(0)),
}
