"""Sound losses: torch's own with their options, and functions that return a sum and its weight."""

from functools import partial

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
    images,
    mlp,
    padded_sentences,
    token_losses,
    vectors,
)

SOUND: list[Make] = []
sound = partial(entry, SOUND)()

Vectors = tuple[Tensor, Tensor]


@sound
def class_weights_and_label_smoothing() -> Case:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]), label_smoothing=0.1)
    return Case(model=mlp(nn.Dropout(0.2)), loss=loss, batch=vectors())


@sound
def pixels_with_an_ignored_class() -> Case:
    """Some rows have no valid pixel at all."""
    x, _ = images()
    y = torch.randint(CLASSES, (8, 6, 6))
    y[1], y[5] = 2, 2
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1))
    return Case(model=model, loss=nn.CrossEntropyLoss(ignore_index=2), batch=(x, y))


@sound
def soft_labels() -> Case:
    return Case(
        model=mlp(), loss=nn.CrossEntropyLoss(), batch=(vectors()[0], torch.rand(8, CLASSES).softmax(dim=1))
    )


@sound
def many_labels_with_pos_weight() -> Case:
    loss = partial(F.binary_cross_entropy_with_logits, pos_weight=torch.full((CLASSES,), 3.0))
    return Case(model=mlp(), loss=loss, batch=(torch.randn(8, WIDTH), torch.rand(8, CLASSES).round()))


@sound
def summed_and_never_divided() -> Case:
    return Case(model=mlp(), loss=nn.CrossEntropyLoss(reduction="sum"), batch=vectors())


@sound
def mean_and_variance() -> Case:
    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.mean(x), F.softplus(self.spread(x))

    return Case(model=Gaussian(), loss=nn.GaussianNLLLoss(), batch=(torch.randn(8, WIDTH), torch.randn(8, 2)))


@sound
def one_number_for_each_row() -> Case:
    """Outputs have no axis but the rows."""
    model = nn.Sequential(*mlp(outputs=1), nn.Flatten(0))
    return Case(model=model, loss=nn.MSELoss(), batch=(torch.randn(8, WIDTH), torch.randn(8)))


@sound
def connectionist_temporal_classification() -> Case:
    """Time is the first axis of the output, rows are the second."""

    class Listener(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).log_softmax(dim=2).transpose(0, 1)

    used = torch.tensor([9, 7, 8, 9, 6, 9, 7, 8])
    said = torch.tensor([3, 1, 2, 3, 2, 1, 3, 2])
    batch = torch.randn(8, 9, WIDTH), (torch.randint(1, 5, (8, 3)), used, said)
    return Case(model=Listener(), loss=nn.CTCLoss(), batch=batch)


@sound
def triplets() -> Case:
    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(nn.Dropout(0.2))

        def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, ...]:
            return self.body(anchor), self.body(positive), self.body(negative)

    batch = {name: torch.randn(8, WIDTH) for name in ("anchor", "positive", "negative")}
    return Case(model=Embedder(), loss=nn.TripletMarginLoss(), batch=batch)


@sound
def valid_tokens_counted() -> Case:
    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        losses = token_losses(model(micro["input_ids"]), micro["labels"])
        return ab.Total(losses.sum(), (micro["labels"] != -100).sum())

    return Case(model=Tagger(), loss=loss, batch=padded_sentences())


@sound
def valid_tokens_counted_after_the_shift() -> Case:
    """Rows of a single token have nothing to predict, so alone they weigh nothing."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        labels = micro["labels"][:, 1:]
        losses = token_losses(model(micro["input_ids"])[:, :-1], labels)
        return ab.Total(losses.sum(), (labels != -100).sum())

    return Case(model=Tagger(), loss=loss, batch=padded_sentences((7, 1, 5, 1, 6, 1, 1, 3)))


@sound
def mean_of_row_means() -> Case:
    """Every row counts the same, however long: a choice, and exact."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        losses = token_losses(model(micro["input_ids"]), micro["labels"])
        means = losses.sum(dim=1) / (micro["labels"] != -100).sum(dim=1)
        return ab.Total(means.sum(), len(means))

    return Case(model=Tagger(), loss=loss, batch=padded_sentences())


@sound
def class_weights_counted() -> Case:
    """The weights stay in float32 whatever the model does."""
    class_weight = torch.tensor([0.2, 1.0, 5.0])

    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        losses = F.cross_entropy(model(x), y, weight=class_weight, reduction="sum")
        return ab.Total(losses, class_weight[y].sum())

    return Case(model=mlp(), loss=loss, batch=vectors(), dtype=torch.float32)


@sound
def mean_times_its_own_denominator() -> Case:
    def loss(model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        return ab.Total(F.cross_entropy(model(x), y) * len(y), len(y))

    return Case(model=mlp(nn.Dropout(0.3)), loss=loss, batch=vectors())


@sound
def rows_with_weights_of_their_own() -> Case:
    """One of them weighs nothing."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        losses = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
        return ab.Total((losses * micro["importance"]).sum(), micro["importance"].sum())

    x, y = vectors()
    importance = torch.tensor([1.0, 0.0, 3.0, 0.5, 2.0, 1.0, 0.1, 4.0])
    return Case(model=mlp(), loss=loss, batch={"x": x, "y": y, "importance": importance})


@sound
def two_terms_with_coefficients() -> Case:
    """The second counts only the rows of one class, and a third is only reported."""

    def loss(model: nn.Module, micro: Vectors) -> dict[str, ab.Total]:
        x, y = micro
        logits, chosen = model(x), (y == 1)
        size = logits.square().sum(dim=1)
        return {
            "main": ab.Total(F.cross_entropy(logits, y, reduction="sum"), len(y)),
            "size": ab.Total((size * chosen).sum(), chosen.sum()),
            "right": ab.Total((logits.detach().argmax(dim=1) == y).sum(), len(y)),
        }

    batch = torch.randn(8, WIDTH), torch.tensor([0, 1, 1, 2, 0, 1, 0, 2])
    return Case(model=mlp(nn.Dropout(0.1)), loss=ab.Terms(loss, coefficients={"size": 0.1}), batch=batch)


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, model: nn.Module, micro: Vectors) -> ab.Total:
        x, y = micro
        return ab.Total(F.cross_entropy(model(x) / self.temperature, y, reduction="sum"), len(y))


@sound
def loss_with_a_parameter() -> Case:
    return Case(model=mlp(), loss=ab.Terms(Tempered()), batch=vectors())


@sound
def penalty_on_the_weights() -> Case:
    """Of no row in particular, so it is weighed with the rows."""

    def loss(model: nn.Module, micro: Vectors) -> dict[str, ab.Total]:
        x, y = micro
        size = sum(parameter.square().sum() for parameter in model.parameters())
        return {
            "fit": ab.Total(F.mse_loss(model(x), y, reduction="sum"), y.numel()),
            "decay": ab.Total(size * len(x), len(x)),
        }

    batch = torch.randn(8, WIDTH), torch.randn(8, CLASSES)
    return Case(model=mlp(), loss=ab.Terms(loss, coefficients={"decay": 0.01}), batch=batch)


@sound
def gradient_penalty_by_row() -> Case:
    """The scores are summed, not averaged, before they are differentiated."""

    def loss(model: nn.Module, micro: Batch) -> ab.Total:
        x = micro["x"].detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ab.Total((slope.norm(dim=1) - 1).square().sum(), len(x))

    return Case(model=mlp(outputs=1), loss=loss, batch={"x": torch.randn(8, WIDTH)})
