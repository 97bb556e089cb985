"""Losses in which rows meet, written the slow and obvious way, with models and rows to try them on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.testing import GradientRecorder
from tests import zoo
from tests.options import flat

FEATURES = 5


def encoder(dropout: float = 0.0, outputs: int = 4) -> nn.Module:
    return zoo.dropout(FEATURES, outputs, p=dropout, width=6)


class Views(nn.Module):
    """One encoder for both columns; the signature of a forward says that the second is no target."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one = self.other = encoder(dropout)

    def forward(self, one: Tensor, other: Tensor) -> Any:
        return self.one(one), self.other(other)


class Towers(Views):
    """Two encoders and a learned temperature, as in CLIP (Radford et al. 2021)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.other, self.log_scale = encoder(dropout), nn.Parameter(torch.tensor(1.5))

    def forward(self, one: Tensor, other: Tensor) -> Any:
        return *map(F.normalize, super().forward(one, other)), self.log_scale.exp()


def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, places = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def clip_by_rows(image: Tensor, text: Tensor, scale: Tensor, rows: Tensor) -> Total:
    there = F.cross_entropy(scale * image[rows] @ text.T, rows, reduction="sum")
    back = F.cross_entropy(scale * text[rows] @ image.T, rows, reduction="sum")
    return Total((there + back) / 2, len(rows))


def triplets(outputs: Tensor, labels: Tensor, rows: Tensor | None = None) -> Total:
    """All triplets within the batch that violate the margin (Schroff et al. 2015, "FaceNet", section 3.2)."""
    rows = torch.arange(len(labels)) if rows is None else rows
    distances = (outputs[rows][:, None] - outputs[None]).square().sum(-1)
    same = labels[rows][:, None] == labels[None]
    apart = rows[:, None] != torch.arange(len(labels))
    losses = distances[:, :, None] - distances[:, None, :] + 0.5
    violated = (same & apart)[:, :, None] & ~same[:, None, :] & (losses > 0)
    return Total(losses[violated].sum(), violated.sum())


def sup_con(outputs: Tensor, labels: Tensor) -> Tensor:
    """Khosla et al. 2020, "Supervised contrastive learning", equation 2."""
    features = F.normalize(outputs)
    own = torch.eye(len(labels), dtype=torch.bool)
    likely = (features @ features.T / 0.3).masked_fill(own, -torch.inf).log_softmax(1)
    positive = (labels[:, None] == labels[None]) & ~own
    return -(likely.masked_fill(~positive, 0).sum(1) / positive.sum(1).clamp(min=1)).mean()


def barlow_twins(one: Tensor, other: Tensor) -> Tensor:
    """Zbontar et al. 2021, "Barlow Twins", section 2.1."""
    correlation = ((one - one.mean(0)) / one.std(0)).T @ ((other - other.mean(0)) / other.std(0)) / len(one)
    return (correlation - torch.eye(len(correlation))).square().sum()


def rank(scores: Tensor, relevance: Tensor) -> Tensor:
    """Burges et al. 2005, "Learning to rank using gradient descent": all pairs of which one is better."""
    better = relevance[:, None] > relevance[None]
    return F.softplus(scores.T - scores)[better].mean()


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy((outputs - outputs.mean(0)) @ self.places.T, labels)


def images_and_texts(rows: int) -> Any:
    return torch.randn(rows, FEATURES), torch.randn(rows, FEATURES)


def pairs(rows: int) -> Any:
    return dict(zip(("one", "other"), images_and_texts(rows), strict=True))


def labelled(rows: int) -> Any:
    return torch.randn(rows, FEATURES), torch.randint(3, (rows,))


def ranked(rows: int) -> Any:
    return {"input": torch.randn(rows, FEATURES), "target": torch.randint(4, (rows,))}


class Case(NamedTuple):
    function: Any
    model: Callable[[float], nn.Module]
    batch: Callable[[int], Any]
    by_rows: Any = None


CASES = {
    "clip": Case(clip, Towers, images_and_texts, clip_by_rows),
    "triplets": Case(triplets, encoder, labelled, triplets),
    "sup-con": Case(sup_con, encoder, labelled),
    "barlow twins": Case(barlow_twins, Views, pairs),
    "rank": Case(rank, lambda dropout: encoder(dropout, 1), ranked),
    "prototypes": Case(Prototypes().double(), encoder, labelled),
}


def take(model: nn.Module, loss: Any, batch: Any, micro_batch: int | None, **options: Any) -> Any:
    recorder = GradientRecorder(model, loss)
    report = Step(model, loss, recorder, micro_batch=micro_batch, **flat(options))(batch)
    return report, recorder.gradients
