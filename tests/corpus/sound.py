# ruff: noqa: F405  (what cases are made of)
"""Sound layers, models of sequences and losses: nothing here depends on the cut."""

import random
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests import zoo
from tests.corpus.case import *  # noqa: F403
from tests.corpus.faults import bent

SOUND, AT_DOORS = Corpus(), Corpus()  # AT_DOORS: nothing but rounding, of which the self-test says so


def of_zoo(name: str) -> Case:
    made, rows, loss, *_ = zoo.ZOO[name]
    own = nn.CrossEntropyLoss() if loss is F.cross_entropy else nn.MSELoss()
    # Numbers that cannot be switched off; and a warning of torch's own.
    doors = () if name in ("drawing", "recomputed, reentrant") else DOORS
    return Case(model=made(), loss=own, batch=rows(ROWS), doors=doors)


SOUND.of(**{f"{name} of the zoo": partial(of_zoo, name) for name, kind in zoo.ZOO.items() if not kind.meets})
SOUND.of(
    backward_that_is_linear=lambda: classifier(
        bent(lambda g: 3 * g), options={"non_finite": "drop"}, doors=("step", "window")
    )
)


class Drop(nn.Module):
    """A branch that is left out for a row, or for a whole micro-batch by one draw."""

    def __init__(self, by: str, p: float = 0.5) -> None:
        super().__init__()
        self.branch, self.by, self.p = nn.Linear(6, 6), by, p

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x).tanh()
        if self.by == "row" and self.p:  # Huang et al. 2016, section 3
            return x + out * x.new_empty(len(x), 1).bernoulli_(1 - self.p) / (1 - self.p)
        draw = random.random() if self.by == "Python" else float(torch.rand(()))
        return x if self.by != "row" and draw < self.p else x + out


def twice(by: str) -> list[nn.Module]:
    return [Drop(by), Drop(by)]


SOUND.of(
    drop_path_by_row=lambda: classifier(*twice("row")),
    layers_dropped_by_one_draw=lambda: classifier(*twice("torch")),
    layers_dropped_by_python=lambda: classifier(*twice("Python"), is_warned=True, doors=("step",)),
    experts_with_dropout=lambda: classifier(Experts(3, dropout=0.3)),
)


def counted(self: Any, x: Tensor) -> Tensor:
    """Counts calls, keeps the last output, and adds up rows, which are the same in every cut."""
    self.total += x.detach().sum(dim=0)
    self.calls, self.rows, self.last = self.calls + 1, self.rows + len(x), [x.detach()]
    return x


def hooks_and_gradients_of_the_users_own() -> Case:
    case = classifier(nn.Linear(6, 6), doors=("batch_loss",))
    case.model[2].register_forward_hook(lambda module, inputs, output: output.tanh())
    for parameter in case.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return case


SOUND.of(
    counters_that_nothing_reads=lambda: classifier(
        layer("Counted", counted, total=torch.zeros(6), calls=0, rows=0, last=[])
    ),
    # As many norms and heads do, whatever comes in.
    float32_inside=lambda: replace(
        classifier(layer("Narrow", lambda x: F.rms_norm(x.float(), (6,)).to(x.dtype))), dtype=torch.float32
    ),
    hooks_and_gradients_of_the_users_own=hooks_and_gradients_of_the_users_own,
)


def causal(dropout: float) -> nn.Module:
    def forward(self: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
        time, p = input_ids.shape[1], self.dropout_p if self.training else 0.0
        x = self.embedding(input_ids) + self.position[:time]
        query, key, value = self.mix(self.norm(x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, dim=1)
        seen = mask.bool()[:, None, None, :] & torch.ones(time, time, dtype=torch.bool).tril()
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=p)
        return self.head(x + attended.transpose(1, 2).flatten(2))

    parts = {"norm": nn.LayerNorm(WIDTH), "mix": nn.Linear(WIDTH, 3 * WIDTH)}
    model: Any = words(forward, position=torch.randn(16, WIDTH), dropout_p=dropout, **parts)
    model.head.weight = model.embedding.weight
    return model


def packed(dropout: float) -> nn.Module:
    def forward(self: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
        read = nn.utils.rnn.pack_padded_sequence(
            self.embedding(input_ids), mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.lstm(read)[1][0][-2:].transpose(0, 1).flatten(1))

    lstm = nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True, dropout=dropout)
    return words(forward, CLASSES, width=10, padding_idx=0, lstm=lstm)


def zero_is_a_word_like_any_other() -> Case:
    """Nothing is padded: rows happen to end in the word 0, and there is neither mask nor padding index."""
    given = torch.randint(WORDS, (8, 6))
    given[::2, -2:] = 0
    return Case(model=zoo.words(), loss=nn.CrossEntropyLoss(), batch=(given, given.roll(-1, 1)))


SOUND.of(
    causal_language_model=lambda: collated(causal(0.0), tag_loss),
    # Shorter micro-batches draw fewer numbers for each row.
    dropout_in_attention_of_ragged_rows=lambda: collated(causal(0.3), tag_loss),
    # What is drawn between the layers has a line for each word, sorted by time, not by row.
    packed_lstm_with_dropout=lambda: tensors(packed(0.3), topic_loss),
    zero_is_a_word_like_any_other=zero_is_a_word_like_any_other,
    # Outputs have no axis but the rows.
    one_number_for_each_row=lambda: Case(
        model=mlp(outputs=1).append(nn.Flatten(0)), loss=nn.MSELoss(), batch=(vectors()[0], torch.randn(8))
    ),
)


@SOUND.loss(model=tagger, batch=lambda: padded_sentences((7, 1, 5, 1, 6, 1, 1, 3)))
def valid_tokens_counted_after_the_shift(model: nn.Module, micro: Batch) -> ab.Total:
    """Rows of a single token have nothing to predict, so alone they weigh nothing."""
    labels = micro["labels"][:, 1:]
    losses = token_losses(model(micro["input_ids"])[:, :-1], labels)
    return ab.Total(losses.sum(), (labels != -100).sum())


class Counts(nn.Module):
    """Writes to one buffer, and puts a new tensor in the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(len(x))
        self.rows = self.rows + len(x)
        return self.linear(x).tanh()


def scripted(kind: str) -> Case:
    """A model with TorchScript in it, which the self-test refuses."""
    encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
        if kind == "the model":
            return replace(classifier(), model=torch.jit.script(mlp()))
        if kind == "a part":
            return classifier(torch.jit.script(Counts()))
        traced = torch.jit.trace(encoder, torch.randn(3, 6))
        return classifier(torch.jit.freeze(torch.jit.script(encoder)) if kind == "frozen" else traced)


AT_DOORS.of(
    **{f"TorchScript, {one}": partial(scripted, one) for one in ("the model", "a part", "traced", "frozen")}
)


of_many = partial(SOUND.loss, model=lambda: mlp(nn.Dropout(0.3)), batch=lambda: columns(40))


@AT_DOORS.loss(batch=lambda: columns(40))
def cancelling(model: nn.Module, batch: Vectors) -> ab.Total:
    return ab.Total((model(batch[0]) - model(batch[0] * (1 + 1e-15))).sum(), len(batch[0]))


@of_many()
def penalty_of_the_parameters(model: nn.Module, batch: Vectors) -> Any:
    size = torch.stack([one.square().sum() for one in model.parameters()]).sum()
    return {"loss": summed(each(model, batch)), "penalty": ab.Total(0.01 * size, 1)}


def focal(out: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(out, target, reduction="none")
    return (1 - (-losses).exp()).square() * losses


def distill(model: nn.Module, batch: Vectors) -> Tensor:
    out, aim = model(batch[0]), batch[2].softmax(1)
    return F.kl_div(out.log_softmax(1), aim, reduction="batchmean") + F.cross_entropy(out, batch[1])


def ppo(model: nn.Module, batch: Vectors) -> Tensor:
    out = model(batch[0])
    ratio, entropy = (out - batch[2]).mul(0.1).exp(), -(out.softmax(1) * out.log_softmax(1)).sum(1)
    return -torch.min(ratio * batch[2], ratio.clamp(0.8, 1.2) * batch[2]).mean() - 0.01 * entropy.mean()


def own(call: Any) -> ab.ModelLoss:
    return ab.ModelLoss(call=call)


LOSSES: dict[str, Any] = {
    "focal": ab.PerRow(focal),
    "masked values": ab.PerRow(lambda out, y: ((out - y).square(), y > 0)),
    "weights of rows": ab.PerRow(lambda out, y: ((out - y).square().mean(1), y[:, 0].abs())),
    "InfoNCE": ab.WholeBatch(lambda out, y: F.cross_entropy(out @ y.T, torch.arange(len(out)))),
    "distillation": own(distill),
    "PPO with entropy": own(ppo),
    "mean of chosen tokens": own(lambda m, b: -((m(b[0]) - b[2]).exp() * b[2])[b[3] > 0].mean()),
    "DPO in two columns": own(lambda m, b: -F.logsigmoid((m(b[0]) - b[2])[:, :2].diff(dim=1)).mean()),
    "rewards in pairs": own(lambda m, b: -F.logsigmoid(m(b[0]) - m(b[0].flip(1)))[:, 0].mean()),
    "mean of the masked": own(lambda m, b: each(m, b)[b[3] > 0].mean()),
    "two means": own(lambda m, b: each(m, b).mean() + 0.01 * m(b[0]).square().mean()),
    "target that is detached": own(lambda m, b: F.mse_loss(m(b[0]), m(b[0] + 1).detach() * 0.9)),
    "cosine embedding": own(lambda m, b: F.cosine_embedding_loss(m(b[0]), b[2], b[3] * 2 - 1)),
    "triplet": own(lambda m, b: F.triplet_margin_loss(m(b[0]), b[2], b[2].flip(1))),
    "margin ranking": own(lambda m, b: F.margin_ranking_loss(m(b[0])[:, 0], b[2][:, 0], b[3] * 2 - 1)),
    "a mean of anchors": own(lambda m, b: each(m, b).mean() + 0.1 * m(torch.ones(10, 6)).square().mean()),
    "a mean of weights": own(
        lambda m, b: each(m, b).mean() + 0.1 * (m[0].weight @ m[0].weight.T).tanh().mean()
    ),
    "variational": own(lambda m, b: F.mse_loss(m(b[0]), b[2]) + 0.1 * (m(b[0]).exp() - m(b[0])).mean()),
}


def of_loss(name: str) -> Case:
    loss, batch = LOSSES[name], columns(40)
    if not isinstance(loss, ab.ModelLoss):
        batch = batch[:2] if name == "focal" else batch[::2]
    doors = ("step", "batch_loss") if name == "InfoNCE" else DOORS
    return Case(model=mlp(nn.Dropout(0.3)), loss=loss, batch=batch, doors=doors)


SOUND.of(**{name: partial(of_loss, name) for name in LOSSES})
