"""Small models that compute their own loss, in the ways people write them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.testing import Perceptron

ROWS, LENGTH, CLASSES = 7, 3, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, LENGTH, 2, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (ROWS, LENGTH), generator=GENERATOR)
LABELS[torch.rand(ROWS, LENGTH, generator=GENERATOR) < 0.4] = -100
LABELS[2:4] = -100  # a micro-batch of two without a single valid target
BATCH = {"x": X, "labels": LABELS}


class Own(nn.Module):
    """Scores of shape (rows, length, classes), and a loss made of them and the labels."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = Perceptron(2, CLASSES).double()
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.scores(x), labels)


def tokens(scores: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **settings)


def size(scores: Tensor) -> Tensor:
    return scores.square().mean()


def in_place(scores: Tensor, labels: Tensor) -> Tensor:
    loss = tokens(scores, labels)
    loss += 0.3 * size(scores)
    loss *= 2
    return loss


def stacked(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([tokens(scores, labels), size(scores), tokens(-scores, labels)]).mean()


def selected(scores: Tensor, labels: Tensor) -> Tensor:
    valid = labels >= 0
    return (
        F.cross_entropy(scores[valid], labels[valid], reduction="none").mean()
        if valid.any()
        else size(scores)
    )


def masked_mean(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.square().sum(-1) * (labels >= 0)).mean()


def statistics_aside(scores: Tensor, labels: Tensor) -> Tensor:
    """A mean in the body whose value flows into the loss only behind another."""
    return tokens(scores - scores.detach().mean() * 0, labels)


def checkpointed(scores: Tensor, labels: Tensor) -> Tensor:
    """A mean in a part of the body that runs again in the backward, where nobody watches."""
    body = checkpoint(lambda x: x.sin() + 0 * x.mean(), scores, use_reentrant=False)
    return tokens(body, labels)


def summed(scores: Tensor, labels: Tensor) -> Tensor:
    return tokens(scores, labels, reduction="sum")


def sum_and_mean(scores: Tensor, labels: Tensor) -> Tensor:
    return tokens(scores, labels, reduction="sum") + size(scores)


def in_checkpoint(scores: Tensor, labels: Tensor) -> Tensor:
    """The loss itself runs again in the backward, also that of a micro-batch without a valid target."""
    return checkpoint(tokens, scores, labels, use_reentrant=False)


def or_nothing(scores: Tensor, labels: Tensor) -> Tensor:
    """A constant where every row is ignored, as some heads return."""
    return tokens(scores, labels) if (labels >= 0).any() else torch.tensor(0.0)


#: Losses that are exact in every cut, by how they are returned.
EXACT: dict[str, Callable[..., Any]] = {
    "scalar": tokens,
    "mapping": lambda scores, labels: {"loss": tokens(scores, labels), "scores": scores},
    "attribute": lambda scores, labels: SimpleNamespace(loss=tokens(scores, labels)),
    "list": lambda scores, labels: [tokens(scores, labels)],
    "tuple with the loss last": lambda scores, labels: (scores, tokens(scores, labels)),
    "in place": in_place,
    "stack": stacked,
    "masked mean": masked_mean,
    "statistics aside": statistics_aside,
    "checkpointed": checkpointed,
    "in a checkpoint": in_checkpoint,
    "or nothing": or_nothing,
    "sum": summed,
    "sum and mean": sum_and_mean,
    "half of two": lambda scores, labels: (tokens(scores, labels) + tokens(2 * scores, labels)) / 2,
    "factor 0.4": lambda scores, labels: tokens(scores, labels) + 0.4 * tokens(scores.sin(), labels),
    "class weights": lambda scores, labels: tokens(
        scores, labels, weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64), label_smoothing=0.1
    ),
    "labels made inside": lambda scores, labels: tokens(scores, (labels + 1).clamp(0, CLASSES - 1)),
    "axes in another order": lambda scores, labels: scores.movedim(0, 2).square().mean(),
    "one of each row": lambda scores, labels: F.mse_loss(
        scores[torch.arange(len(scores)), labels.argmax(1)], torch.ones(len(scores), CLASSES).double()
    ),
    "sum of a constant factor": lambda scores, labels: 0.01 * summed(scores, labels),
    "sums": lambda scores, labels: (
        F.mse_loss(scores, scores.detach() + 1, reduction="sum") - 0.5 * torch.sum(1 - scores.square())
    ),
    "weight for every element": lambda scores, labels: F.binary_cross_entropy_with_logits(
        scores, torch.full_like(scores, 0.25), weight=(labels >= 0)[..., None].expand_as(scores).double()
    ),
    "next token": lambda scores, labels: tokens(scores[:, :-1], labels[:, 1:]),
    "means and sums as they are written": lambda scores, labels: (
        torch.mean(input=scores.square())
        + torch.mean(scores.sin())
        + scores.cos().mean(dim=(0, 1, 2))
        + torch.sum(scores.sin())
        + scores.square().sum((0, 1, 2))
    ),
}

MET = "elements from . rows .* rows have met before it"

#: Losses that are refused, with what the message names.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "own division": (
        lambda scores, labels: (scores.square().sum(-1) * (labels >= 0)).sum() / (labels >= 0).sum(),
        "Own to be made of means .* a sum that is divided afterwards, .* in sum",
    ),
    "own norm": (lambda scores, labels: scores.norm(), "Own to reach its parameters only .* 'scores.layers"),
    "root": (lambda scores, labels: size(scores).sqrt(), "a sum of means with constant factors"),
    "product": (lambda scores, labels: size(scores) * tokens(scores, labels), "constant factors"),
    "scaled sum": (lambda scores, labels: summed(scores, labels) / len(labels), "a sum that is divided"),
    "factor of the rows": (lambda scores, labels: size(scores) * (1 + labels.sum()), "same factors"),
    "folded rows": (
        lambda scores, labels: scores.mean(0).square().mean(),
        MET,
    ),
    "mean loss of folded rows": (
        lambda scores, labels: F.mse_loss(scores.mean(0), torch.ones_like(scores[0])),
        MET,
    ),
    "sum of folded rows": (
        lambda scores, labels: scores.mean(0).square().sum(),
        "loss and gradient from Own in every cut",
    ),
    "balance": (
        lambda scores, labels: tokens(scores, labels) + scores.softmax(-1).mean((0, 1)).square().mean(),
        MET,
    ),
    "loop over rows": (
        lambda scores, labels: torch.stack(
            [F.cross_entropy(*row) for row in zip(scores, labels.clamp(min=0), strict=True)]
        ).mean(),
        "A mean for every row, as of a loop over rows",
    ),
    "loop over rows, added": (
        lambda scores, labels: sum(F.mse_loss(row, torch.ones_like(row)) for row in scores),
        "A mean for every row, as of a loop over rows",
    ),
    "weights of the rows at hand": (
        lambda scores, labels: tokens(
            scores, labels, weight=torch.bincount(labels.clamp(min=0).flatten(), minlength=CLASSES).double()
        ),
        "settings of cross_entropy in Own to be the same .* weight = ",
    ),
    "positive weight of the rows at hand": (
        lambda scores, labels: F.binary_cross_entropy_with_logits(
            scores[..., 0], (labels > 1).double(), pos_weight=(labels < 2).sum() / (labels > 1).sum()
        ),
        "settings of binary_cross_entropy_with_logits in Own .* pos_weight = ",
    ),
    "threshold of the rows at hand": (
        lambda scores, labels: F.huber_loss(scores, -scores.detach(), delta=scores.detach().std().item()),
        "settings of huber_loss in Own .* delta = ",
    ),
    "labels masked inside": (
        lambda scores, labels: tokens(scores, labels.masked_fill(labels == 1, -100)),
        "Own to make its targets from the batch as in the first",
    ),
    "contrast": (
        lambda scores, labels: F.cross_entropy(
            scores.flatten(1) @ scores.flatten(1).T, torch.arange(len(scores))
        ),
        "contrastive",
    ),
    "contrast by pairs": (
        lambda scores, labels: -F.logsigmoid(scores.flatten(1) @ scores.flatten(1).T).sum(-1).mean(),
        "loss and gradient from Own in every cut",
    ),
    "nothing": (lambda scores, labels: {"scores": scores}, "Own to return its loss"),
    "no scalar": (
        lambda scores, labels: F.mse_loss(scores, scores * 0, reduction="none"),
        r"shape \(\d, 3, 4\)",
    ),
    "two scalars": (lambda scores, labels: (size(scores), tokens(scores, labels)), "2 scalars with gradient"),
    "no gradient": (lambda scores, labels: size(scores.detach()), "without gradient"),
}


class Layer(nn.Module):
    """A linear layer and a loss of it, its input and the labels, in which parameters stand beside rows."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, CLASSES).double()
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layer.weight, self.layer(x), x, labels)


def _error(outputs: Tensor) -> Tensor:
    return F.mse_loss(outputs, torch.ones_like(outputs))


#: Losses with parameters in them that are exact: what looks like rows that meet is none.
WITH_PARAMETERS: dict[str, Callable[..., Tensor]] = {
    "mean of parameters": lambda weight, scores, x, labels: (
        tokens(scores, labels) + 0.1 * weight.square().mean()
    ),
    "mean loss of parameters": lambda weight, scores, x, labels: (
        tokens(scores, labels) + 0.1 * F.mse_loss(weight, torch.zeros_like(weight))
    ),
    "columns of one length": lambda weight, scores, x, labels: _error(x @ (weight / weight.norm(dim=0)).T),
    "centred prototypes": lambda weight, scores, x, labels: _error(x @ (weight - weight.mean(0)).T),
    "merged weights": lambda weight, scores, x, labels: _error(x @ (weight.T @ weight)),
    "time first": lambda weight, scores, x, labels: _error(scores.transpose(0, 1).mean(0)),
}
