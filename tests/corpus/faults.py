# ruff: noqa: F405  (what cases are made of)
"""Faults: rows meet, places, calls or padding matter, gradients or rows get lost, losses divide wrongly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.corpus.case import *  # noqa: F403

FAULTS, AT_DOORS = Corpus(), Corpus()  # AT_DOORS: nothing that the self-test has to see


def across_rows() -> Case:
    """Attention that takes the axes of (rows, time, features) for (time, rows, features)."""
    forward = lambda self, x: self.head(self.reader(x, x, x, need_weights=False)[0].mean(1))  # noqa: E731
    reader = nn.MultiheadAttention(FEATURES, 2, dropout=0.1)
    model = layer("Series", forward, reader=reader, head=nn.Linear(FEATURES, CLASSES))
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=vectors(5, FEATURES))


def crowded() -> nn.Module:
    """Most rows want the first expert, and there is no room for all of them."""
    experts = Experts(2, room=0.5)
    with torch.no_grad():
        experts.gate.bias.copy_(torch.tensor([1.5, -1.5]))
    return experts


def between(forward: Callable[[Tensor], Tensor]) -> Any:
    return lambda: classifier(layer("Meeting", forward), nn.Linear(6, 6), nn.Tanh())


FAULTS.of(
    "meeting", r"Meeting[^$]*[17] other rows of 8 change", "Rows affect",
    a_row_in_the_middle_leads=between(lambda x: x + x[len(x) // 2]),
)  # fmt: skip
FAULTS.of(
    "meeting", "BatchNorm1d",
    # `eval()` does not help here: there is nothing to use but the batch.
    batch_norm_without_statistics=lambda: classifier(nn.BatchNorm1d(6, track_running_stats=False).eval()),
    batch_norm_before_dropout=lambda: classifier(nn.BatchNorm1d(6), nn.Dropout(0.4)),
)  # fmt: skip
FAULTS.of(
    "meeting, position", "Meeting|reader", "Rows affect",
    batch_mean_subtracted=between(lambda x: x - x.mean(dim=0, keepdim=True)),
    batch_norm_as_a_function=between(lambda x: F.batch_norm(x, None, None, training=True)),
    shuffled=between(lambda x: x.flip(0)),
    divided_by_the_largest=between(lambda x: x / x.detach().abs().max()),
    only_where_a_graph_is_made=between(lambda x: x + 0.3 * x.mean(0) if x.requires_grad else x),
    attention_across_rows=across_rows,
)  # fmt: skip
FAULTS.of(
    "meeting, position", "Experts|Mixup",
    router_with_capacity=lambda: classifier(crowded()),
    # Each row is mixed with another, chosen at random.
    mixed_at_random=lambda: regression(layer("Mixup", lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))])),
)  # fmt: skip
FAULTS.of(
    "meeting, unexplained", "Share",
    divided_by_the_number_of_rows=lambda: regression(layer("Share", lambda x: x / len(x))),
)  # fmt: skip


def masked_by_a_seed(self: Any, x: Tensor) -> Tensor:
    self.generator.manual_seed(7)
    return x * 2 * (torch.rand(x.shape, generator=self.generator) > 0.5)


def reseeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x, 0.5, training=True)


FAULTS.of(
    "position", "Own|from NumPy",
    dropout_of_own_seed=lambda: classifier(layer("Own", masked_by_a_seed, generator=torch.Generator())),
    global_seed_set_in_forward=lambda: classifier(layer("Own", reseeded), doors=()),
    noise_from_numpy=lambda: classifier(
        layer("Noise", lambda x: x + torch.as_tensor(np.random.rand(*x.shape), dtype=x.dtype))
    ),
)  # fmt: skip


def keeping(rule: Any, **state: Any) -> Case:
    return classifier(layer("Keeping", rule, **state))


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x / self.calls


def queueing(self: Any, x: Tensor) -> Tensor:
    """Computes with its last outputs, as MoCo does."""
    self.queue = self.queue + x.detach().sum(0)
    return x * self.queue


def spectral_norm_in_training() -> Case:
    """One power iteration for each call in training mode, on a weight that has just been updated."""
    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    nn.init.normal_(norm.parametrizations.weight.original)
    return classifier(norm, nn.Tanh())


FAULTS.of(
    "state", "Keeping|pectral|parametriz|Linear", "The forward changes|Rows affect",
    scaled_by_a_counter_in_a_buffer=lambda: keeping(counting, calls=torch.zeros(())),
    scaled_by_a_counter_in_python=lambda: keeping(counting, calls=0),
    queue_of_outputs=lambda: keeping(queueing, queue=torch.zeros(6)),
    spectral_norm_in_training=spectral_norm_in_training,
)  # fmt: skip


def bent(bend: Callable[[Tensor], Tensor]) -> nn.Module:
    """The identity, with another backward."""

    def forward(x: Tensor) -> Tensor:
        out = x.clone()
        if out.requires_grad:
            out.register_hook(bend)
        return out

    return layer("Bent", forward)


FAULTS.of(
    "unexplained",
    first_half_detached=between(lambda x: torch.cat([x[: len(x) // 2].detach(), x[len(x) // 2 :]])),
    # Rows meet in backward alone.
    gradient_normalised_over_the_rows=lambda: classifier(bent(lambda g: g / (g.norm() + 1e-8))),
    gradient_of_the_mean_row=lambda: classifier(bent(lambda g: g - g.mean(0))),
)  # fmt: skip


@FAULTS.loss("dropped rows", "Pairs", model=lambda: mlp(layer("Pairs", lambda x: x[: len(x) // 2 * 2])))
def odd_row_dropped_by_the_model(model: nn.Module, micro: Vectors) -> ab.Total:
    losses = model(micro[0]).square().sum(1) + 1
    return ab.Total(losses.sum(), losses.numel())


def attention() -> nn.Module:
    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        x = model.embedding(words)
        return model.head(x + model.attention(x, x, x, need_weights=False)[0])

    return words(forward, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))


def last_state() -> nn.Module:
    """Classifies what it remembers at the end, after the padding."""
    lstm = nn.LSTM(WIDTH, 5, batch_first=True)
    last = lambda model, words, mask: model.head(model.lstm(model.embedding(words))[1][0][-1])  # noqa: E731
    return words(last, CLASSES, width=5, padding_idx=0, lstm=lstm)


FAULTS.of(
    "padding", r"attention|LSTM|\Athe model",
    mask_ignored_by_attention=lambda: collated(attention(), tag_loss),
    mask_ignored_by_attention_padded_beforehand=lambda: tensors(attention(), tag_loss),
    last_state_after_padding=lambda: collated(last_state(), topic_loss),
)  # fmt: skip

IN_THE_LOSS = r"\A.*loss"  # the culprit itself, not only the sentence about it


def token_mean(model: nn.Module, micro: Batch) -> Tensor:
    return F.cross_entropy(model(micro["input_ids"]).flatten(0, 1), micro["labels"].flatten())


FAULTS.of(
    "denominator", "labels",
    bare_mean_of_collated_sentences=lambda: Case(
        model=tagger(), loss=token_mean, batch=sentences(), collate=pad
    ),
    # The first rows are all alike and would show nothing.
    short_rows_come_late=lambda: Case(
        model=tagger(), loss=token_mean, batch=padded_sentences([6] * 40 + [1, 6] * 4)
    ),
)  # fmt: skip
FAULTS.of(
    "denominator", "row|element",
    bare_mean_under_dropout=lambda: Case(
        model=mlp(nn.Dropout(0.3)), loss=lambda model, micro: each(model, micro).mean(), batch=vectors()
    ),
)  # fmt: skip


@FAULTS.loss("meeting", r"\A.*(loss|in_batch)", batch=lambda: features(text=torch.randn(8, FEATURES)))
def contrastive_mean_times_rows(model: nn.Module, micro: Batch) -> ab.Total:
    one, other = F.normalize(model(micro["x"])), F.normalize(model(micro["text"]))
    rows = len(one)
    return ab.Total(F.cross_entropy(one @ other.T / 0.2, torch.arange(rows)) * rows, rows)


@FAULTS.loss("meeting", IN_THE_LOSS, batch=lambda: (*vectors(), torch.randn(8) + 3))
def advantages_normalised_in_the_loss(model: nn.Module, micro: Vectors) -> ab.Total:
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


of_many: Any = partial(FAULTS.loss, batch=lambda: columns(40))


def chosen(part: Callable[[Tensor], Tensor]) -> Any:
    """A loss of some of the rows, divided by how many there are."""
    return lambda model, batch: summed(part(each(model, batch)))


first_16 = chosen(lambda x: x[:16])


of_many(name="first 16")(first_16)
of_many(name="16 largest")(chosen(lambda x: x.topk(min(16, len(x))).values))
of_many(name="trimmed mean")(chosen(lambda x: x.sort().values[: len(x) - len(x) // 10]))
of_many(name="12 hard at least")(chosen(lambda x: x.topk(min(len(x), max(12, len(x) // 3))).values))
FAULTS.of(room_for_8_rows_at_least=lambda: classifier(Experts(2, room=0.25, least=8), batch=vectors(rows=40)))


@of_many()
def class_balance(model: nn.Module, batch: Vectors) -> ab.Total:
    weight = (1 / torch.bincount(batch[1], minlength=4).clamp(min=1))[batch[1]].to(batch[0])
    return ab.Total((each(model, batch) * weight).sum(), weight.sum())


BENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: g.clamp(-2e-3, 2e-3),
    "sign": lambda g: g.sign() * 1e-3,
    "norm of a row": lambda g: g / (1e-3 + g.norm(dim=-1, keepdim=True)),
    "8 bits": lambda g: (g * 2**13).round() / 2**13,
}


def bending(name: str, *doors: str, **options: Any) -> Case:
    return classifier(bent(BENDS[name]), options=options, doors=doors)


for bend in BENDS:  # seen where the end divides
    late = partial(bending, bend, "step", "batch_loss", non_finite="drop")
    AT_DOORS.of("", "", "not linear", **{bend: partial(bending, bend, "window"), f"{bend}, drop": late})


def centred() -> Case:
    """A center that moves in every forward, as that of DINO."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.body(x)
        self.center.lerp_(out.detach().mean(0), 0.1)
        return out - self.center

    model = layer("Centred", forward, body=mlp(), center=torch.zeros(CLASSES))
    return Case(model=model, loss=nn.MSELoss(), batch=columns()[::2])


AT_DOORS.of("", "", "The forward changes", center_that_moves=centred)


@of_many("", "", "draws random numbers")
def mixup(model: nn.Module, batch: Vectors) -> ab.Total:
    other = torch.randperm(len(batch[0]))
    out = model(0.7 * batch[0] + 0.3 * batch[0][other])
    return ab.Total((out - batch[2]).square().mean(1).sum(), len(other))


@of_many("denominator", r"batch\[3\]|micro\[3\]", "Rows affect")
def masked_mean(model: nn.Module, batch: Vectors) -> ab.Total:
    return ab.Total((each(model, batch) * batch[3]).sum() / batch[3].sum() * len(batch[3]), len(batch[3]))


@of_many("", "", "Rows affect")
def noisy_and_wrong(model: nn.Module, batch: Vectors) -> ab.Total:
    return masked_mean(model, (batch[0] + 1e-6 * torch.randn_like(batch[0]), *batch[1:]))


# In the first the gradient is right, and the value of the loss is not.
AT_DOORS.of(
    constant_added=lambda: Case(
        model=mlp(), loss=ab.ModelLoss(call=lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 3), batch=columns()
    ),
    # That of the update before is dropped after the window was filled.
    gradient_dropped_late=lambda: classifier(doors=("batch_loss window",)),
)
