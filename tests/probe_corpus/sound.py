"""Sound layers, models of sequences and losses: nothing here depends on the cut."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from tests.probe_corpus.case import (
    CLASSES,
    WIDTH,
    WORDS,
    Batch,
    Case,
    Corpus,
    Experts,
    Tagger,
    Words,
    classifier,
    collated,
    features,
    images,
    layer,
    mlp,
    of_series,
    padded_sentences,
    regression,
    tag_loss,
    tensors,
    token_losses,
    topic_loss,
    vectors,
)

SOUND = Corpus()


def convolutional(*middle: nn.Module) -> Case:
    """The layer in a small convolutional network; buffers have moved, as in a training that goes on."""
    layers = nn.Conv2d(2, 4, 3), *middle, nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.LazyLinear(CLASSES))
    case = Case(model=model, loss=nn.CrossEntropyLoss(), batch=images())
    case.model(case.batch[0])
    return case


SOUND.of(
    perceptron=regression,
    convolutions_with_group_norm=lambda: convolutional(nn.GroupNorm(2, 4)),
    # The rest trains on, as in fine-tuning.
    batch_norm_in_eval=lambda: convolutional(nn.BatchNorm2d(4).eval(), nn.Dropout(0.2)),
    dropout=lambda: classifier(nn.Dropout(0.5)),
)

# ---- random numbers


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


def recomputed() -> nn.Module:
    """Keeps no activations; the backward pass runs the block, dropout and all, once more."""
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4))
    forward = lambda self, x: x + checkpoint(self.block, x, use_reentrant=False)  # noqa: E731
    return layer("Recomputed", forward, block=block)


SOUND.of(
    drop_path_by_row=lambda: classifier(Drop("row"), Drop("row")),
    layers_dropped_by_one_draw=lambda: classifier(*[Drop("torch") for _ in range(3)]),
    layers_dropped_by_python=lambda: classifier(*[Drop("Python") for _ in range(3)]),
    gradient_checkpointing=lambda: classifier(recomputed(), recomputed()),
    experts_with_dropout=lambda: classifier(Experts(3, dropout=0.3)),
)

# ---- what models carry


def counted(self: Any, x: Tensor) -> Tensor:
    """Counts calls, keeps the last output, and adds up rows, which are the same in every cut."""
    self.total += x.detach().sum(dim=0)
    self.calls, self.rows, self.last = self.calls + 1, self.rows + len(x), [x.detach()]
    return x


def bfloat16_parameters() -> Case:
    case = classifier(nn.Dropout(0.1))
    return replace(case, model=case.model.bfloat16(), batch=(case.batch[0].bfloat16(), case.batch[1]))


def hooks_and_gradients_of_the_users_own() -> Case:
    case = classifier(nn.Linear(6, 6))
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
    bfloat16_parameters=bfloat16_parameters,
    hooks_and_gradients_of_the_users_own=hooks_and_gradients_of_the_users_own,
)


# ---- sequences of equal length


class Series(nn.Module):
    def __init__(self, reader: nn.Module, width: int, outputs: int = CLASSES, *, swaps: bool) -> None:
        super().__init__()
        self.reader, self.head, self.swaps = reader, nn.Linear(width, outputs), swaps

    def states(self, x: Tensor) -> Tensor:
        out = self.reader(x.transpose(0, 1) if self.swaps else x)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(x).mean(dim=0 if self.swaps else 1))


SOUND.of(
    encoder_with_time_first=lambda: of_series(
        Series(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.2), WIDTH, swaps=True)
    ),
    lstm_with_dropout_and_time_first=lambda: of_series(
        Series(nn.LSTM(WIDTH, 5, num_layers=2, dropout=0.3), 5, swaps=True)
    ),
)


# ---- words


class Causal(nn.Module):
    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("position", torch.randn(16, WIDTH))
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout_p = dropout_p

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        time = input_ids.shape[1]
        x = self.embedding(input_ids) + self.position[:time]
        query, key, value = self.mix(self.norm(x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, dim=1)
        seen = attention_mask.bool()[:, None, None, :] & torch.ones(time, time, dtype=torch.bool).tril()
        p = self.dropout_p if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=p)
        return self.head(x + attended.transpose(1, 2).flatten(2))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    shares = mask[:, :, None].to(x.dtype)
    return (x * shares).sum(dim=1) / shares.sum(dim=1)


def encoder(dropout: float) -> nn.Module:
    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        x = model.encoder(model.embedding(words), src_key_padding_mask=mask == 0)
        return model.head(masked_mean(x, mask))

    inner = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout, batch_first=True)
    return Words(forward, CLASSES, padding_idx=0, encoder=nn.TransformerEncoder(inner, 2, None, False))


def packed(dropout: float = 0.0) -> nn.Module:
    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        read = nn.utils.rnn.pack_padded_sequence(
            model.embedding(words), mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        return model.head(model.lstm(read)[1][0][-2:].transpose(0, 1).flatten(1))

    lstm = nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True, dropout=dropout)
    return Words(forward, CLASSES, width=10, padding_idx=0, lstm=lstm)


def zero_is_a_word_like_any_other() -> Case:
    """Nothing is padded: rows happen to end in the word 0, and there is neither mask nor padding index."""
    words = torch.randint(WORDS, (8, 6))
    words[::2, -2:] = 0
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    model.append(layer("Swap", lambda x: x.transpose(1, 2)))
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=(words, words.roll(-1, 1)))


SOUND.of(
    causal_language_model=lambda: collated(Causal(0.0), tag_loss),
    # Shorter micro-batches draw fewer numbers for each row.
    dropout_in_attention_of_ragged_rows=lambda: collated(Causal(0.3), tag_loss),
    encoder_of_ragged_rows_with_dropout=lambda: collated(encoder(0.2), topic_loss),
    # What is drawn between the layers has a line for each word, sorted by time, not by row.
    packed_lstm_with_dropout=lambda: tensors(packed(0.3), topic_loss),
    zero_is_a_word_like_any_other=zero_is_a_word_like_any_other,
)

# ---- losses

of_tokens = partial(SOUND.loss, model=Tagger, batch=padded_sentences)


SOUND.of(
    # Outputs have no axis but the rows.
    one_number_for_each_row=lambda: Case(
        model=mlp(outputs=1).append(nn.Flatten(0)), loss=nn.MSELoss(), batch=(vectors()[0], torch.randn(8))
    ),
)


@of_tokens(batch=lambda: padded_sentences((7, 1, 5, 1, 6, 1, 1, 3)))
def valid_tokens_counted_after_the_shift(model: nn.Module, micro: Batch) -> ab.Total:
    """Rows of a single token have nothing to predict, so alone they weigh nothing."""
    labels = micro["labels"][:, 1:]
    losses = token_losses(model(micro["input_ids"])[:, :-1], labels)
    return ab.Total(losses.sum(), (labels != -100).sum())


@SOUND.loss(model=lambda: mlp(outputs=1), batch=features)
def gradient_penalty_by_row(model: nn.Module, micro: Batch) -> ab.Total:
    """The scores are summed, not averaged, before they are differentiated."""
    x = micro["x"].detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ab.Total((slope.norm(dim=1) - 1).square().sum(), len(x))
