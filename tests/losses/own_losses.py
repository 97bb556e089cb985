"""Small models that compute their own loss, in the ways people write them."""

from collections.abc import Callable
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


#: Losses that are exact in every cut, by how they are returned.
EXACT: dict[str, Callable[..., Any]] = {
    "scalar": tokens,
    "mapping": lambda scores, labels: {"loss": tokens(scores, labels), "scores": scores},
    "tuple with the loss last": lambda scores, labels: (scores, tokens(scores, labels)),
    "in place": in_place,
    "stack": stacked,
    "masked mean": masked_mean,
    "statistics aside": statistics_aside,
    "checkpointed": checkpointed,
    "sum": summed,
    "sum and mean": sum_and_mean,
    "half of two": lambda scores, labels: (tokens(scores, labels) + tokens(2 * scores, labels)) / 2,
    "factor 0.4": lambda scores, labels: tokens(scores, labels) + 0.4 * tokens(scores.sin(), labels),
    "class weights": lambda scores, labels: tokens(
        scores, labels, weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64), label_smoothing=0.1
    ),
    "module": lambda scores, labels: nn.CrossEntropyLoss()(scores.transpose(1, 2), labels),
    "binary": lambda scores, labels: F.binary_cross_entropy_with_logits(
        scores, (scores.detach() > 0).double()
    ),
    "batchmean": lambda scores, labels: F.kl_div(
        scores.log_softmax(-1), torch.full_like(scores, 0.25), reduction="batchmean"
    ),
    "soft targets": lambda scores, labels: F.cross_entropy(
        scores.flatten(0, 1), torch.full_like(scores.flatten(0, 1), 0.25)
    ),
    "labels made inside": lambda scores, labels: tokens(scores, (labels + 1).clamp(0, CLASSES - 1)),
    "next token": lambda scores, labels: tokens(scores[:, :-1], labels[:, 1:]),
}

#: Losses that are refused, with what the message names.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "own division": (
        lambda scores, labels: (scores.square().sum(-1) * (labels >= 0)).sum() / (labels >= 0).sum(),
        "Own to reach its parameters only through means .* 'scores.layers",
    ),
    "root": (lambda scores, labels: size(scores).sqrt(), "a sum of means with constant factors"),
    "product": (lambda scores, labels: size(scores) * tokens(scores, labels), "constant factors"),
    "scaled sum": (lambda scores, labels: summed(scores, labels) / len(labels), "a sum that is scaled"),
    "factor of the rows": (lambda scores, labels: size(scores) * (1 + labels.sum()), "same factors"),
    "folded rows": (lambda scores, labels: scores.mean(0).square().mean(), "folded along its first axis"),
    "labels masked inside": (
        lambda scores, labels: tokens(scores, labels.masked_fill(labels == 1, -100)),
        "Own to make its targets from the batch as in the first",
    ),
    "no rows": (lambda scores, labels: scores.movedim(0, 2).square().mean(), "no multiple of the 2 rows"),
    "contrast": (
        lambda scores, labels: F.cross_entropy(
            scores.flatten(1) @ scores.flatten(1).T, torch.arange(len(scores))
        ),
        "contrastive",
    ),
    "contrast by pairs": (
        lambda scores, labels: -F.logsigmoid(scores.flatten(1) @ scores.flatten(1).T).sum(-1).mean(),
        "every row compared with every other",
    ),
    "nothing": (lambda scores, labels: {"scores": scores}, "Own to return its loss"),
    "no scalar": (
        lambda scores, labels: F.mse_loss(scores, scores * 0, reduction="none"),
        r"shape \(2, 3, 4\)",
    ),
    "two scalars": (lambda scores, labels: (size(scores), tokens(scores, labels)), "2 scalars with gradient"),
    "no gradient": (lambda scores, labels: size(scores.detach()), "without gradient"),
    "only parameters": (lambda scores, labels: scores.sum(), "reach its parameters only"),
}
