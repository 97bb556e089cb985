"""Faults in losses: means without their denominator, the wrong denominator, rows that meet in the loss."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.probe_corpus.case import Case, Make, entry
from tests.probe_corpus.data import (
    CLASSES,
    WIDTH,
    Batch,
    Tagger,
    mlp,
    numbers,
    pad,
    padded_sentences,
    sentences,
    vectors,
)

FAULTS: list[Make] = []
fault = partial(entry, FAULTS)
IN_THE_LOSS = r"\A.*loss"  # the culprit itself, not only the sentence about it

Vectors = tuple[Tensor, Tensor]


def token_mean(model: nn.Module, micro: Batch) -> Tensor:
    """What every tutorial writes."""
    return F.cross_entropy(model(micro["input_ids"]).flatten(0, 1), micro["labels"].flatten())


@fault("denominator", culprit="labels")
def bare_mean_over_tokens() -> Case:
    return Case(model=Tagger(), loss=token_mean, batch=padded_sentences())


@fault("denominator", culprit="labels")
def bare_mean_of_collated_sentences() -> Case:
    return Case(model=Tagger(), loss=token_mean, batch=sentences(), collate=pad)


@fault("denominator", culprit="labels")
def short_rows_come_late() -> Case:
    """The first rows are all alike and would show nothing."""
    return Case(model=Tagger(), loss=token_mean, batch=padded_sentences([6] * 40 + [1, 6] * 4))


@fault("denominator", culprit="row|element")
def bare_mean_over_rows() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> Tensor:
        return F.mse_loss(model(micro[0]), micro[1])

    return Case(model=mlp(outputs=1), loss=loss, batch=numbers())


@fault("denominator", culprit="row|element")
def bare_mean_under_dropout() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> Tensor:
        return F.cross_entropy(model(micro[0]), micro[1])

    return Case(model=mlp(nn.Dropout(0.3)), loss=loss, batch=vectors())


@fault("denominator", culprit="labels")
def mean_counted_as_one() -> Case:
    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        return ab.Total(token_mean(model, micro), 1)

    return Case(model=Tagger(), loss=loss, batch=padded_sentences())


@fault("denominator", culprit=IN_THE_LOSS)
def sum_counted_as_one() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        return ab.Total(F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), 1)

    return Case(model=mlp(), loss=loss, batch=vectors())


@fault("denominator", culprit=IN_THE_LOSS)
def divided_by_the_longest_row() -> Case:
    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        logits, labels = model(micro["input_ids"]), micro["labels"]
        return ab.Total(
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.shape[1]
        )

    return Case(model=Tagger(), loss=loss, batch=sentences(), collate=pad)


@fault("denominator", culprit="labels")
def token_mean_times_rows() -> Case:
    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        rows = len(micro["labels"])
        return ab.Total(token_mean(model, micro) * rows, rows)

    return Case(model=Tagger(), loss=loss, batch=padded_sentences())


@fault("denominator", culprit="labels")
def token_mean_times_places() -> Case:
    """Padded places are counted too."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        places = micro["labels"].numel()
        return ab.Total(token_mean(model, micro) * places, places)

    return Case(model=Tagger(), loss=loss, batch=padded_sentences((7, 1, 7, 1, 2, 1, 6, 1)))


@fault("denominator", culprit="shift")
def labels_counted_before_the_shift() -> Case:
    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        logits, labels = model(micro["input_ids"])[:, :-1], micro["labels"][:, 1:]
        mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        valid = (micro["labels"] != -100).sum()
        return ab.Total(mean * valid, valid)

    return Case(model=Tagger(), loss=loss, batch=padded_sentences((7, 2, 7, 2, 2, 2, 2, 3)))


@fault("denominator", culprit="class weight")
def class_weights_forgotten() -> Case:
    """The weights stay in float32 whatever the model does."""
    class_weight = torch.tensor([0.2, 1.0, 5.0])

    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        return ab.Total(F.cross_entropy(model(x), y, weight=class_weight) * len(y), len(y))

    batch = torch.randn(8, WIDTH), torch.tensor([0, 2, 1, 0, 0, 1, 2, 2])
    return Case(model=mlp(), loss=loss, batch=batch, dtype=torch.float32)


@fault("denominator", culprit="class weight")
def class_weights_in_a_criterion() -> Case:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))

    def loss(model: nn.Module, micro: Batch) -> Tensor:
        return criterion(model(micro["x"]), micro["y"])

    batch = {"x": torch.randn(8, WIDTH), "y": torch.tensor([2, 2, 0, 0, 0, 1, 2, 1])}
    return Case(model=mlp(), loss=loss, batch=batch, dtype=torch.float32)


@fault("denominator", culprit="mask")
def masked_bce_mean() -> Case:
    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        losses = F.binary_cross_entropy_with_logits(model(micro["x"]), micro["y"], reduction="none")
        mean = (losses * micro["label_mask"]).sum() / micro["label_mask"].sum().clamp(min=1)
        return ab.Total(mean * len(losses), len(losses))

    known = torch.tensor(
        [[1, 1, 1], [1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0]]
    )
    batch = {"x": torch.randn(8, WIDTH), "y": torch.rand(8, CLASSES).round(), "label_mask": known.float()}
    return Case(model=mlp(), loss=loss, batch=batch)


@fault("denominator", culprit="label")
def detection_divided_by_its_positives() -> Case:
    """As in detectors: anchors of class 0 are background, and the positives of a micro-batch divide."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        logits, rows = model(micro["x"]), len(micro["labels"])
        positives = (micro["labels"] > 0).sum().clamp(min=1)
        losses = F.cross_entropy(logits.transpose(1, 2), micro["labels"], reduction="sum")
        return ab.Total(losses / positives * rows, rows)

    labels = torch.tensor(
        [[1, 2, 2], [1, 0, 0], [2, 2, 1], [0, 0, 1], [0, 1, 0], [2, 0, 0], [1, 1, 1], [0, 2, 0]]
    )
    return Case(model=mlp(), loss=loss, batch={"x": torch.randn(8, 3, WIDTH), "labels": labels})


@fault("denominator", "meeting", "unexplained", culprit=IN_THE_LOSS)
def two_means_added() -> Case:
    """No single denominator is right: one mean is over tokens, the other over rows."""

    def loss(model: nn.Module, micro: Batch) -> Tensor:
        return token_mean(model, micro) + model(micro["input_ids"]).mean(dim=(1, 2)).square().mean()

    return Case(model=Tagger(), loss=loss, batch=padded_sentences())


@fault("denominator", culprit=r"\A.*tokens")
def one_of_two_terms_is_wrong() -> Case:
    def loss(model: nn.Module, micro: Batch) -> dict[str, ab.Total]:
        logits, rows = model(micro["input_ids"]), len(micro["labels"])
        size = logits.square().mean(dim=(1, 2))
        return {
            "tokens": ab.Total(token_mean(model, micro) * rows, rows),
            "size": ab.Total(size.sum(), rows),
        }

    return Case(model=Tagger(), loss=ab.Terms(loss, coefficients={"size": 0.1}), batch=padded_sentences())


@fault("dropped rows", culprit=IN_THE_LOSS)
def short_micro_batch_skipped() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        losses = F.cross_entropy(model(x), y, reduction="none")
        return ab.Total(losses.sum(), len(y)) if len(y) >= 3 else ab.Total(0.0 * losses.sum(), 0)

    return Case(model=mlp(), loss=loss, batch=vectors())


@fault("dropped rows", culprit=IN_THE_LOSS)
def last_row_left_out() -> Case:
    """Off by one: the last row of every micro-batch is not looked at."""

    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        losses = F.cross_entropy(model(x), y, reduction="none")[: max(len(y) - 1, 1)]
        return ab.Total(losses.sum(), len(losses))

    return Case(model=mlp(), loss=loss, batch=vectors())


@fault("meeting", culprit=r"\A.*(loss|in_batch_negatives)")
def contrastive_mean_times_rows() -> Case:
    def in_batch_negatives(model: nn.Module, micro: Batch) -> ab.Total:
        one, other = F.normalize(model(micro["image"])), F.normalize(model(micro["text"]))
        rows = len(one)
        return ab.Total(F.cross_entropy(one @ other.T / 0.2, torch.arange(rows)) * rows, rows)

    batch = {"image": torch.randn(8, WIDTH), "text": torch.randn(8, WIDTH)}
    return Case(model=mlp(), loss=in_batch_negatives, batch=batch)


class Experts(nn.Module):
    """A mixture that tells how it routed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2 * CLASSES)
        nn.init.normal_(self.gate.weight)  # decided enough to send rows to both

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(dim=1)
        return (self.experts(x).unflatten(1, (2, CLASSES)) * shares[:, :, None]).sum(dim=1), shares


@fault("meeting", culprit=r"\A.*router")
def router_loss_as_a_term() -> Case:
    """Fractions times mean shares (Fedus et al. 2021, section 2.2): a product of two means."""

    def loss(model: nn.Module, micro: Vectors) -> dict[str, ab.Total]:
        x, y = micro
        logits, shares = model(x)
        fractions = F.one_hot(shares.argmax(dim=1), 2).to(shares.dtype).mean(dim=0)
        balance = 2 * (fractions * shares.mean(dim=0)).sum()
        losses = F.cross_entropy(logits, y, reduction="sum")
        return {"main": ab.Total(losses, len(y)), "router": ab.Total(balance * len(y), len(y))}

    return Case(model=Experts(), loss=ab.Terms(loss, coefficients={"router": 0.5}), batch=vectors())


@fault("meeting", culprit=IN_THE_LOSS)
def divided_by_the_largest_loss() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
        return ab.Total((losses / losses.max().detach()).sum(), len(losses))

    return Case(model=mlp(), loss=loss, batch=vectors())


@fault("meeting", culprit=IN_THE_LOSS)
def advantages_normalised_in_the_loss() -> Case:
    """Policy gradient as it is mostly written: the returns are standardised where the loss is computed."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        returns = micro["returns"]
        advantage = (returns - returns.mean()) / (returns.std() + 1e-8)  # NaN for a single row
        chosen = model(micro["x"]).log_softmax(dim=1).gather(1, micro["action"][:, None])[:, 0]
        return ab.Total(-(chosen * advantage).sum(), len(chosen))

    x, action = vectors()
    return Case(model=mlp(), loss=loss, batch={"x": x, "action": action, "returns": torch.randn(8) + 3})


@fault("meeting", culprit=IN_THE_LOSS)
def hardest_half_of_the_rows() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
        hardest = losses.topk((len(losses) + 1) // 2).values
        return ab.Total(hardest.sum(), len(hardest))

    return Case(model=mlp(), loss=loss, batch=vectors())


@fault("meeting", culprit=r"\A.*(loss|dice)")
def dice_over_the_batch() -> Case:
    def dice(model: nn.Module, micro: Vectors) -> ab.Total:
        there, wanted = model(micro[0]).sigmoid(), micro[1]
        overlap = 2 * (there * wanted).sum() / (there.sum() + wanted.sum() + 1e-6)
        return ab.Total((1 - overlap) * len(wanted), len(wanted))

    return Case(model=mlp(), loss=dice, batch=(torch.randn(8, WIDTH), torch.rand(8, CLASSES).round()))


@fault("meeting", "denominator", "unexplained", culprit=r"\A.*(loss|penalty)")
def gradient_penalty_of_a_mean() -> Case:
    """The critic's mean is differentiated by its inputs, so each row's gradient is divided by the rows."""

    def penalty(model: nn.Module, micro: Any) -> ab.Total:
        x = micro["x"].detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).mean(), x, create_graph=True)
        return ab.Total((slope.norm(dim=1) - 1).square().sum(), len(x))

    return Case(model=mlp(outputs=1), loss=penalty, batch={"x": torch.randn(8, WIDTH)})
