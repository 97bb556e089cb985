"""Losses in which rows meet, written the slow and obvious way, with models and rows to try them on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.testing import GradientRecorder
from tests.options import flat

FEATURES, WIDTH = 5, 6


class Towers(nn.Module):
    """Two encoders and a learned temperature, as in CLIP (Radford et al. 2021)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image, self.text = encoder(dropout), encoder(dropout)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image)), F.normalize(self.text(text)), self.log_scale.exp()


class Views(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder(dropout)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(one), self.encoder(other)


def encoder(dropout: float = 0.0, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, outputs)
    )


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
        centred = outputs - outputs.mean(0)
        return F.cross_entropy(centred @ self.places.T, labels)


def pairs(rows: int) -> Any:
    return {"one": torch.randn(rows, FEATURES), "other": torch.randn(rows, FEATURES)}


def images_and_texts(rows: int) -> Any:
    return torch.randn(rows, FEATURES), torch.randn(rows, FEATURES)


def labelled(rows: int) -> Any:
    return torch.randn(rows, FEATURES), torch.randint(3, (rows,))


def ranked(rows: int) -> Any:
    return {"input": torch.randn(rows, FEATURES), "target": torch.randint(4, (rows,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    function: Any
    model: Callable[[float], nn.Module]
    batch: Callable[[int], Any]
    by_rows: Any = None


CASES = {
    "clip": Case(function=clip, model=Towers, batch=images_and_texts, by_rows=clip_by_rows),
    "triplets": Case(function=triplets, model=encoder, batch=labelled, by_rows=triplets),
    "sup-con": Case(function=sup_con, model=encoder, batch=labelled),
    "barlow twins": Case(function=barlow_twins, model=Views, batch=pairs),
    "rank": Case(function=rank, model=lambda dropout: encoder(dropout, 1), batch=ranked),
    "prototypes": Case(function=Prototypes().double(), model=encoder, batch=labelled),
}


def take(model: nn.Module, loss: Any, batch: Any, micro_batch: int | None, **options: Any) -> Any:
    recorder = GradientRecorder(model, loss)
    report = Step(model, loss, recorder, micro_batch=micro_batch, **flat(options))(batch)
    return report, recorder.gradients
