"""Sound losses: torch's own with their options, and functions that return a sum and its weight."""

from functools import partial

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
    images,
    layer,
    mlp,
    numbers,
    padded_sentences,
    token_losses,
    vectors,
)

SOUND = Corpus()
BALANCE = torch.tensor([0.2, 1.0, 5.0])
of_tokens = partial(SOUND.loss, model=Tagger, batch=padded_sentences)
of_classes = partial(SOUND.loss, model=mlp, batch=vectors)


def pixels_with_an_ignored_class() -> Case:
    x, _ = images()
    y = torch.randint(CLASSES, (8, 6, 6))
    y[1], y[5] = 2, 2
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1))
    return Case(model=model, loss=nn.CrossEntropyLoss(ignore_index=2), batch=(x, y))


def connectionist_temporal_classification() -> Case:
    listen = layer("Listen", lambda x: x.log_softmax(dim=2).transpose(0, 1))
    used, said = torch.tensor([9, 7, 8, 9, 6, 9, 7, 8]), torch.tensor([3, 1, 2, 3, 2, 1, 3, 2])
    batch = torch.randn(8, 9, WIDTH), (torch.randint(1, 5, (8, 3)), used, said)
    return Case(model=nn.Sequential(nn.Linear(WIDTH, 5), listen), loss=nn.CTCLoss(), batch=batch)


SOUND.of(
    class_weights_and_label_smoothing=lambda: Case(
        model=mlp(nn.Dropout(0.2)),
        loss=nn.CrossEntropyLoss(weight=BALANCE, label_smoothing=0.1),
        batch=vectors(),
    ),
    pixels_with_an_ignored_class=pixels_with_an_ignored_class,
    soft_labels=lambda: Case(
        model=mlp(), loss=nn.CrossEntropyLoss(), batch=(vectors()[0], torch.rand(8, CLASSES).softmax(dim=1))
    ),
    many_labels_with_pos_weight=lambda: Case(
        model=mlp(),
        loss=partial(F.binary_cross_entropy_with_logits, pos_weight=torch.full((CLASSES,), 3.0)),
        batch=(torch.randn(8, WIDTH), torch.rand(8, CLASSES).round()),
    ),
    summed_and_never_divided=lambda: Case(
        model=mlp(), loss=nn.CrossEntropyLoss(reduction="sum"), batch=vectors()
    ),
    # Outputs have no axis but the rows.
    one_number_for_each_row=lambda: Case(
        model=mlp(outputs=1).append(nn.Flatten(0)), loss=nn.MSELoss(), batch=(vectors()[0], torch.randn(8))
    ),
    connectionist_temporal_classification=connectionist_temporal_classification,
)


@of_tokens(batch=lambda: padded_sentences((7, 1, 5, 1, 6, 1, 1, 3)))
def valid_tokens_counted_after_the_shift(model: nn.Module, micro: Batch) -> ab.Total:
    """Rows of a single token have nothing to predict, so alone they weigh nothing."""
    labels = micro["labels"][:, 1:]
    losses = token_losses(model(micro["input_ids"])[:, :-1], labels)
    return ab.Total(losses.sum(), (labels != -100).sum())


@of_classes(model=lambda: mlp(nn.Dropout(0.3)))
def mean_times_its_own_denominator(model: nn.Module, micro: Vectors) -> ab.Total:
    x, y = micro
    return ab.Total(F.cross_entropy(model(x), y) * len(y), len(y))


@of_classes(batch=lambda: (*vectors(), torch.tensor([1.0, 0.0, 3.0, 0.5, 2.0, 1.0, 0.1, 4.0])))
def rows_with_weights_of_their_own(model: nn.Module, micro: tuple[Tensor, ...]) -> ab.Total:
    x, y, importance = micro
    losses = F.cross_entropy(model(x), y, reduction="none")
    return ab.Total((losses * importance).sum(), importance.sum())


@of_classes(
    model=lambda: mlp(nn.Dropout(0.1)),
    batch=lambda: (torch.randn(8, WIDTH), torch.tensor([0, 1, 1, 2, 0, 1, 0, 2])),
    terms={"size": 0.1},
)
def two_terms_with_coefficients(model: nn.Module, micro: Vectors) -> dict[str, ab.Total]:
    """The second counts only the rows of one class, and a third is only reported."""
    x, y = micro
    logits, chosen = model(x), (y == 1)
    size = logits.square().sum(dim=1)
    return {
        "main": ab.Total(F.cross_entropy(logits, y, reduction="sum"), len(y)),
        "size": ab.Total((size * chosen).sum(), chosen.sum()),
        "right": ab.Total((logits.detach().argmax(dim=1) == y).sum(), len(y)),
    }


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        return ab.Total(F.cross_entropy(model(x) / self.temperature, y, reduction="sum"), len(y))


SOUND.of(loss_with_a_parameter=lambda: Case(model=mlp(), loss=ab.Terms(Tempered()), batch=vectors()))


@of_classes(batch=lambda: numbers(CLASSES), terms={"decay": 0.01})
def penalty_on_the_weights(model: nn.Module, micro: Vectors) -> dict[str, ab.Total]:
    """Of no row in particular, so it is weighed with the rows."""
    x, y = micro
    size = sum(parameter.square().sum() for parameter in model.parameters())
    fit = ab.Total(F.mse_loss(model(x), y, reduction="sum"), y.numel())
    return {"fit": fit, "decay": ab.Total(size * len(x), len(x))}


@SOUND.loss(model=lambda: mlp(outputs=1), batch=features)
def gradient_penalty_by_row(model: nn.Module, micro: Batch) -> ab.Total:
    """The scores are summed, not averaged, before they are differentiated."""
    x = micro["x"].detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ab.Total((slope.norm(dim=1) - 1).square().sum(), len(x))
