"""Faults in losses: means without their denominator, the wrong denominator, rows that meet in the loss."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.probe_corpus.case import (
    CLASSES,
    WIDTH,
    Batch,
    Case,
    Corpus,
    Tagger,
    Vectors,
    features,
    mlp,
    pad,
    padded_sentences,
    sentences,
    vectors,
)

FAULTS = Corpus()
IN_THE_LOSS = r"\A.*loss"  # the culprit itself, not only the sentence about it
of_classes = partial(FAULTS.loss, model=mlp, batch=vectors)
meeting = partial(of_classes, "meeting")


def token_mean(model: nn.Module, micro: Batch) -> Tensor:
    return F.cross_entropy(model(micro["input_ids"]).flatten(0, 1), micro["labels"].flatten())


def losses_of(model: nn.Module, micro: Vectors, reduction: str = "none") -> Tensor:
    return F.cross_entropy(model(micro[0]), micro[1], reduction=reduction)


FAULTS.of(
    "denominator",
    "labels",
    bare_mean_of_collated_sentences=lambda: Case(
        model=Tagger(), loss=token_mean, batch=sentences(), collate=pad
    ),
    # The first rows are all alike and would show nothing.
    short_rows_come_late=lambda: Case(
        model=Tagger(), loss=token_mean, batch=padded_sentences([6] * 40 + [1, 6] * 4)
    ),
)
FAULTS.of(
    "denominator",
    "row|element",
    bare_mean_under_dropout=lambda: Case(
        model=mlp(nn.Dropout(0.3)), loss=lambda m, micro: losses_of(m, micro, "mean"), batch=vectors()
    ),
)


@of_classes("denominator", IN_THE_LOSS)
def sum_counted_as_one(model: nn.Module, micro: Vectors) -> ab.Total:
    return ab.Total(losses_of(model, micro, "sum"), 1)


@FAULTS.loss("denominator", IN_THE_LOSS, model=Tagger, batch=sentences, collate=pad)
def divided_by_the_longest_row(model: nn.Module, micro: Batch) -> ab.Total:
    logits, labels = model(micro["input_ids"]).flatten(0, 1), micro["labels"]
    return ab.Total(F.cross_entropy(logits, labels.flatten(), reduction="sum"), labels.shape[1])


KNOWN = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0]])


@FAULTS.loss(
    "denominator",
    "mask",
    model=mlp,
    batch=lambda: features(y=torch.rand(8, CLASSES).round(), label_mask=KNOWN.float()),
)
def masked_bce_mean(model: nn.Module, micro: Batch) -> ab.Total:
    losses = F.binary_cross_entropy_with_logits(model(micro["x"]), micro["y"], reduction="none")
    mean = (losses * micro["label_mask"]).sum() / micro["label_mask"].sum().clamp(min=1)
    return ab.Total(mean * len(losses), len(losses))


@FAULTS.loss("denominator, meeting, unexplained", IN_THE_LOSS, model=Tagger, batch=padded_sentences)
def two_means_added(model: nn.Module, micro: Batch) -> Tensor:
    """No single denominator is right: one mean is over tokens, the other over rows."""
    return token_mean(model, micro) + model(micro["input_ids"]).mean(dim=(1, 2)).square().mean()


@of_classes("dropped rows", IN_THE_LOSS)
def short_micro_batch_skipped(model: nn.Module, micro: Vectors) -> ab.Total:
    losses = losses_of(model, micro)
    return ab.Total(losses.sum(), len(losses)) if len(losses) >= 3 else ab.Total(0.0 * losses.sum(), 0)


@meeting(
    r"\A.*(loss|in_batch)",
    batch=lambda: {"image": torch.randn(8, WIDTH), "text": torch.randn(8, WIDTH)},
)
def contrastive_mean_times_rows(model: nn.Module, micro: Batch) -> ab.Total:
    one, other = F.normalize(model(micro["image"])), F.normalize(model(micro["text"]))
    rows = len(one)
    return ab.Total(F.cross_entropy(one @ other.T / 0.2, torch.arange(rows)) * rows, rows)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2 * CLASSES)
        nn.init.normal_(self.gate.weight)  # decided enough to send rows to both

    def forward(self, x: Tensor) -> Vectors:
        shares = self.gate(x).softmax(dim=1)
        return (self.experts(x).unflatten(1, (2, CLASSES)) * shares[:, :, None]).sum(dim=1), shares


@meeting(r"\A.*router", model=Experts, terms={"router": 0.5})
def router_loss_as_a_term(model: nn.Module, micro: Vectors) -> dict[str, ab.Total]:
    """Fractions times mean shares (Fedus et al. 2021, section 2.2): a product of two means."""
    x, y = micro
    logits, shares = model(x)
    fractions = F.one_hot(shares.argmax(dim=1), 2).to(shares.dtype).mean(dim=0)
    balance = 2 * (fractions * shares.mean(dim=0)).sum()
    losses = F.cross_entropy(logits, y, reduction="sum")
    return {"main": ab.Total(losses, len(y)), "router": ab.Total(balance * len(y), len(y))}


@meeting(IN_THE_LOSS, batch=lambda: (*vectors(), torch.randn(8) + 3))
def advantages_normalised_in_the_loss(model: nn.Module, micro: tuple[Tensor, ...]) -> ab.Total:
    """Policy gradient as it is mostly written: the returns are standardised where the loss is computed."""
    x, action, returns = micro
    advantage = (returns - returns.mean()) / (returns.std() + 1e-8)  # NaN for a single row
    chosen = model(x).log_softmax(dim=1).gather(1, action[:, None])[:, 0]
    return ab.Total(-(chosen * advantage).sum(), len(chosen))


@meeting(IN_THE_LOSS)
def hardest_half_of_the_rows(model: nn.Module, micro: Vectors) -> ab.Total:
    losses = losses_of(model, micro)
    hardest = losses.topk((len(losses) + 1) // 2).values
    return ab.Total(hardest.sum(), len(hardest))


@FAULTS.loss(
    "meeting, denominator, unexplained", r"\A.*(loss|penalty)", model=lambda: mlp(outputs=1), batch=features
)
def gradient_penalty_of_a_mean(model: nn.Module, micro: Any) -> ab.Total:
    """The critic's mean is differentiated by its inputs, so each row's gradient is divided by the rows."""
    x = micro["x"].detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).mean(), x, create_graph=True)
    return ab.Total((slope.norm(dim=1) - 1).square().sum(), len(x))
