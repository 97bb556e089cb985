"""Faults in models: what fills short rows up is seen by the rest."""

from typing import Any

from torch import Tensor, nn

from tests.probe_corpus.case import (
    CLASSES,
    WIDTH,
    WORDS,
    Corpus,
    Words,
    collated,
    tag_loss,
    tensors,
    topic_loss,
)

FAULTS = Corpus()


def attention(*, is_inverted: bool = False) -> nn.Module:
    """Takes the mask and forgets it, or passes it on the wrong way round."""

    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        x, hidden = model.embedding(words), None
        if is_inverted:
            hidden = mask.bool().clone()
            hidden[:, -1] = False  # so that a row without padding has something to look at
        return model.head(x + model.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0])

    return Words(forward, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))


def pooled(padding_idx: int | None = None) -> nn.Module:
    """The mean over all places, padded ones included."""
    mean = lambda model, words, mask: model.head(model.layer(model.embedding(words)).tanh().mean(1))  # noqa: E731
    return Words(mean, CLASSES, padding_idx=padding_idx, layer=nn.Linear(WIDTH, WIDTH))


def last_state() -> nn.Module:
    """Classifies what it remembers at the end, after the padding."""
    lstm = nn.LSTM(WIDTH, 5, batch_first=True)
    last = lambda model, words, mask: model.head(model.lstm(model.embedding(words))[1][0][-1])  # noqa: E731
    return Words(last, CLASSES, width=5, padding_idx=0, lstm=lstm)


def both_ways() -> nn.Module:
    """Tags every token; the way back begins in the padding."""
    lstm = nn.LSTM(WIDTH, 5, batch_first=True, bidirectional=True)
    tag = lambda model, words, mask: model.head(model.lstm(model.embedding(words))[0])  # noqa: E731
    return Words(tag, width=10, padding_idx=0, lstm=lstm)


def convolved() -> nn.Module:
    """The first layer's bias makes something out of padding, and the second looks at it."""

    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        return model.second(model.first(model.embedding(words).transpose(1, 2)).tanh()).transpose(1, 2)

    first, second = nn.Conv1d(WIDTH, 5, 3, padding=1), nn.Conv1d(5, WORDS, 3, padding=1)
    return Words(forward, padding_idx=0, first=first, second=second)


def normed() -> nn.Module:
    """Normalises over all places of a row."""

    def forward(model: Any, words: Tensor, mask: Tensor) -> Tensor:
        return model.head(model.norm(model.embedding(words).transpose(1, 2)).transpose(1, 2))

    return Words(forward, norm=nn.GroupNorm(1, WIDTH))


def first_last() -> nn.Module:
    """Takes the last place of every row as its end."""
    ends = lambda model, words, mask: model.head(model.embedding(words)[:, [0, -1]].flatten(1))  # noqa: E731
    return Words(ends, CLASSES, width=2 * WIDTH)


FAULTS.of(
    "padding",
    "attention",
    mask_ignored_by_attention=lambda: collated(attention(), tag_loss),
    mask_ignored_by_attention_padded_beforehand=lambda: tensors(attention(), tag_loss),
    mask_the_wrong_way_round=lambda: collated(attention(is_inverted=True), tag_loss),
)
FAULTS.of(
    "padding",
    r"\Athe model",
    mean_over_padding=lambda: collated(pooled(padding_idx=0), topic_loss),
    mean_over_padding_padded_beforehand=lambda: tensors(pooled(), topic_loss),
    last_place_taken_for_the_end=lambda: tensors(first_last(), topic_loss),
)
FAULTS.of(
    "padding",
    r"LSTM|\Athe model",
    last_state_after_padding=lambda: collated(last_state(), topic_loss),
    last_state_after_padding_padded_beforehand=lambda: tensors(last_state(), topic_loss),
)
FAULTS.of(
    "padding",
    "LSTM|Conv1d|GroupNorm",
    backward_reader_begins_in_padding=lambda: collated(both_ways(), tag_loss),
    convolution_over_padding=lambda: collated(convolved(), tag_loss),
    group_norm_over_padding=lambda: collated(normed(), tag_loss),
)
