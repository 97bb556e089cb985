"""Faults: rows meet, places, calls or padding matter, gradients or rows get lost, losses divide wrongly."""

from functools import partial
from typing import Any

import numpy as np
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
    Experts,
    Tagger,
    Vectors,
    Words,
    classifier,
    collated,
    features,
    layer,
    mlp,
    numbers,
    of_series,
    pad,
    padded_sentences,
    regression,
    sentences,
    tag_loss,
    tensors,
    topic_loss,
    vectors,
)

FAULTS = Corpus()

# ---- rows meet


class Series(nn.Module):
    """Reads (rows, time, features) with a layer that takes the axes for (time, rows, features)."""

    def __init__(self, reader: nn.Module, width: int) -> None:
        super().__init__()
        self.reader, self.head = reader, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(*[x] * 3, need_weights=False)[0].mean(dim=1))


def crowded() -> nn.Module:
    """Most rows want the first expert, and there is no room for all of them."""
    experts = Experts(2, room=0.5)
    with torch.no_grad():
        experts.gate.bias.copy_(torch.tensor([1.5, -1.5]))
    return experts


def before(name: str, forward: Any) -> Case:
    case = classifier()
    return Case(model=nn.Sequential(layer(name, forward), case.model), loss=case.loss, batch=case.batch)


def marked(x: Tensor) -> Tensor:
    """Rows meet behind a switch that only leaves have."""
    if x.requires_grad and not x.is_leaf:
        raise RuntimeError("you can only change requires_grad flags of leaf variables")
    x.requires_grad = True
    return x - x.mean(0)


def rows_that_look_for_their_like() -> Case:
    case = before("Meeting", lambda x: x * (x[:, None] == x).all(2).sum(1, keepdim=True))
    case.batch[0][5] = case.batch[0][0]
    return case


FAULTS.of(
    "meeting",
    r"Meeting[^$]*[17] other rows of 8 change",
    a_row_in_the_middle_leads=lambda: classifier(layer("Meeting", lambda x: x + x[len(x) // 2])),
    rows_that_look_for_their_like=rows_that_look_for_their_like,
    inputs_that_ask_for_gradients=lambda: before("Meeting", marked),
)
FAULTS.of(
    "meeting",
    "BatchNorm1d",
    # `eval()` does not help here: there is nothing to use but the batch.
    batch_norm_without_running_statistics=lambda: classifier(
        nn.BatchNorm1d(6, track_running_stats=False).eval()
    ),
    batch_norm_before_dropout=lambda: classifier(nn.BatchNorm1d(6), nn.Dropout(0.4)),
)
FAULTS.of(
    "meeting",
    "Meeting",
    batch_mean_subtracted=lambda: classifier(
        layer("Meeting", lambda x: x - x.mean(dim=0, keepdim=True)), nn.Linear(6, 6), nn.Tanh()
    ),
)
FAULTS.of(
    "meeting",
    "reader",
    attention_across_rows=lambda: of_series(Series(nn.MultiheadAttention(WIDTH, 2), WIDTH)),
)
FAULTS.of(
    "meeting, position",
    "Experts|Mixup",
    router_with_capacity=lambda: classifier(crowded()),
    # Each row is mixed with another, chosen at random.
    rows_mixed_at_random=lambda: regression(
        layer("Mixup", lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))]), outputs=CLASSES
    ),
)
FAULTS.of(
    "meeting, unexplained",
    "Share",
    divided_by_the_number_of_rows=lambda: regression(layer("Share", lambda x: x / len(x)), outputs=CLASSES),
)

# ---- by position


def masked(self: Any, x: Tensor) -> Tensor:
    self.generator.manual_seed(7)
    return x * 2 * (torch.rand(x.shape, generator=self.generator) > 0.5)


def reseeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x, 0.5, training=True)


FAULTS.of(
    "position",
    "OwnDropout|Layer",
    dropout_from_a_seed_of_its_own=lambda: classifier(
        layer("OwnDropout", masked, generator=torch.Generator())
    ),
    global_seed_set_in_forward=lambda: classifier(layer("Layer", reseeded)),
)
FAULTS.of(
    "position",
    "from NumPy",
    noise_from_numpy=lambda: classifier(
        layer("Noise", lambda x: x + torch.as_tensor(np.random.rand(*x.shape), dtype=x.dtype))
    ),
)

# ---- state


def keeping(rule: Any, **state: Any) -> Case:
    return classifier(layer("Keeping", rule, **state))


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x / self.calls


def fading(self: Any, x: Tensor) -> Tensor:
    """The same numbers, whose gradient depends on earlier calls."""
    level = self.level
    self.level = 0.9 * level
    return x.detach() + (x - x.detach()) * level


def spectral_norm_in_training() -> Case:
    """One power iteration for each call in training mode, on a weight that has just been updated."""
    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    nn.init.normal_(norm.parametrizations.weight.original)
    return classifier(norm, nn.Tanh())


FAULTS.of(
    "state",
    "Keeping|pectral|parametriz|Linear",
    scaled_by_a_counter_in_a_buffer=lambda: keeping(counting, calls=torch.zeros(())),
    scaled_by_a_counter_in_python=lambda: keeping(counting, calls=0),
    spectral_norm_in_training=spectral_norm_in_training,
)
FAULTS.of("unexplained", "", gradient_fades=lambda: keeping(fading, level=torch.ones(())))

# ---- without gradient, without output


def half_detached(x: Tensor) -> Tensor:
    """Trains on the second half of its rows only: one forgot that both halves are fresh."""
    half = len(x) // 2
    return torch.cat([x[:half].detach(), x[half:]])


class Balanced(torch.autograd.Function):
    """The identity, whose gradient is divided by its size over all rows: they meet in backward alone."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0] / (gradients[0].norm() + 1e-8)


FAULTS.of(
    "unexplained",
    "",
    first_half_detached=lambda: classifier(layer("HalfDetached", half_detached), nn.Linear(6, 6), nn.Tanh()),
)
FAULTS.of(
    "unexplained",
    "",
    gradient_normalised_over_the_rows=lambda: classifier(layer("GradientNorm", Balanced.apply)),
)


@FAULTS.loss(
    "dropped rows",
    "Pairs",
    model=lambda: mlp(layer("Pairs", lambda x: x[: len(x) // 2 * 2]), outputs=1),
    batch=numbers,
)
def odd_row_dropped_by_the_model(model: nn.Module, micro: Vectors) -> ab.Total:
    out = model(micro[0])
    losses = F.mse_loss(out, micro[1][: len(out)], reduction="none")
    return ab.Total(losses.sum(), losses.numel())


# ---- what fills short rows up is seen by the rest


def attention() -> nn.Module:
    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        x = model.embedding(words)
        return model.head(x + model.attention(x, x, x, need_weights=False)[0])

    return Words(forward, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))


def last_state() -> nn.Module:
    """Classifies what it remembers at the end, after the padding."""
    lstm = nn.LSTM(WIDTH, 5, batch_first=True)
    last = lambda model, words, mask: model.head(model.lstm(model.embedding(words))[1][0][-1])  # noqa: E731
    return Words(last, CLASSES, width=5, padding_idx=0, lstm=lstm)


FAULTS.of(
    "padding",
    "attention",
    mask_ignored_by_attention=lambda: collated(attention(), tag_loss),
    mask_ignored_by_attention_padded_beforehand=lambda: tensors(attention(), tag_loss),
)
FAULTS.of(
    "padding",
    r"LSTM|\Athe model",
    last_state_after_padding=lambda: collated(last_state(), topic_loss),
)

# ---- losses

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


@meeting(
    r"\A.*(loss|in_batch)",
    batch=lambda: {"image": torch.randn(8, WIDTH), "text": torch.randn(8, WIDTH)},
)
def contrastive_mean_times_rows(model: nn.Module, micro: Batch) -> ab.Total:
    one, other = F.normalize(model(micro["image"])), F.normalize(model(micro["text"]))
    rows = len(one)
    return ab.Total(F.cross_entropy(one @ other.T / 0.2, torch.arange(rows)) * rows, rows)


@meeting(IN_THE_LOSS, batch=lambda: (*vectors(), torch.randn(8) + 3))
def advantages_normalised_in_the_loss(model: nn.Module, micro: tuple[Tensor, ...]) -> ab.Total:
    """Policy gradient as it is mostly written: the returns are standardised where the loss is computed."""
    x, action, returns = micro
    advantage = (returns - returns.mean()) / (returns.std() + 1e-8)  # NaN for a single row
    chosen = model(x).log_softmax(dim=1).gather(1, action[:, None])[:, 0]
    return ab.Total(-(chosen * advantage).sum(), len(chosen))


@FAULTS.loss(
    "meeting, denominator, unexplained", r"\A.*(loss|penalty)", model=lambda: mlp(outputs=1), batch=features
)
def gradient_penalty_of_a_mean(model: nn.Module, micro: Any) -> ab.Total:
    """The critic's mean is differentiated by its inputs, so each row's gradient is divided by the rows."""
    x = micro["x"].detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).mean(), x, create_graph=True)
    return ab.Total((slope.norm(dim=1) - 1).square().sum(), len(x))
