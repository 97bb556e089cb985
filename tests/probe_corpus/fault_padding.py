"""Faults in models: what fills short rows up is seen by the rest."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.probe_corpus.case import Case, Make, entry
from tests.probe_corpus.data import (
    CLASSES,
    WIDTH,
    WORDS,
    Batch,
    inputs_of,
    pad,
    padded_sentences,
    repad,
    sentences,
    token_losses,
)

FAULTS: list[Make] = []
fault = partial(entry, FAULTS)


def tag_loss(model: nn.Module, micro: Batch) -> ab.Total:
    """Of every token that has a label."""
    losses = token_losses(model(**inputs_of(micro)), micro["labels"])
    return ab.Total(losses.sum(), (micro["labels"] != -100).sum())


def topic_loss(model: nn.Module, micro: Batch) -> ab.Total:
    """Of every row."""
    logits = model(**inputs_of(micro))
    return ab.Total(F.cross_entropy(logits, micro["topic"], reduction="sum"), len(logits))


def collated(model: nn.Module, loss: object) -> Case:
    """Padded micro-batch by micro-batch, so the padding changes with the cut."""
    return Case(model=model, loss=loss, batch=sentences(), collate=pad, repad=repad)


def tensors(model: nn.Module, loss: object) -> Case:
    """Padded beforehand, so that no cut shows the fault; other padding does."""
    return Case(model=model, loss=loss, batch=padded_sentences(), repad=repad)


class Attentive(nn.Module):
    """Takes the mask and forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


@fault("padding", culprit="attention")
def mask_ignored_by_attention() -> Case:
    return collated(Attentive(), tag_loss)


@fault("padding", culprit="attention")
def mask_ignored_by_attention_padded_beforehand() -> Case:
    return tensors(Attentive(), tag_loss)


class Inverted(Attentive):
    """Passes the mask on the wrong way round: what is to be seen is hidden."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        hidden = attention_mask.bool().clone()
        hidden[:, -1] = False  # so that a row without padding has something to look at
        return self.head(x + self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0])


@fault("padding", culprit="attention")
def mask_the_wrong_way_round() -> Case:
    return collated(Inverted(), tag_loss)


class Pooled(nn.Module):
    """The mean over all places, padded ones included."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=padding_idx)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(input_ids)).tanh().mean(dim=1))


@fault("padding", culprit="Pooled")
def mean_over_padding() -> Case:
    return collated(Pooled(padding_idx=0), topic_loss)


@fault("padding", culprit="Pooled")
def mean_over_padding_padded_beforehand() -> Case:
    return tensors(Pooled(), topic_loss)


class Reader(nn.Module):
    """Reads on through the padding."""

    def __init__(self, *, bidirectional: bool, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, 5, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(10 if bidirectional else 5, outputs)


class LastState(Reader):
    """Classifies what it remembers at the end."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(input_ids))
        return self.head(hidden[-1])


@fault("padding", culprit="LSTM|LastState")
def last_state_after_padding() -> Case:
    return collated(LastState(bidirectional=False, outputs=CLASSES), topic_loss)


@fault("padding", culprit="LSTM|LastState")
def last_state_after_padding_padded_beforehand() -> Case:
    return tensors(LastState(bidirectional=False, outputs=CLASSES), topic_loss)


class BothWays(Reader):
    """Tags every token; the way back begins in the padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0])


@fault("padding", culprit="LSTM")
def backward_reader_begins_in_padding() -> Case:
    return collated(BothWays(bidirectional=True, outputs=WORDS), tag_loss)


class Convolved(nn.Module):
    """The first layer's bias makes something out of padding, and the second looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.first = nn.Conv1d(WIDTH, 5, 3, padding=1)
        self.second = nn.Conv1d(5, WORDS, 3, padding=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(1, 2)
        return self.second(self.first(x).tanh()).transpose(1, 2)


@fault("padding", culprit="first|second|Conv1d")
def convolution_over_padding() -> Case:
    return collated(Convolved(), tag_loss)


class Normed(nn.Module):
    """Normalises over all places of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm, self.head = nn.GroupNorm(1, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        return self.head(x)


@fault("padding", culprit="norm|GroupNorm")
def group_norm_over_padding() -> Case:
    return collated(Normed(), tag_loss)


class FirstLast(nn.Module):
    """Takes the last place of every row as its end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)[:, [0, -1]].flatten(1))


@fault("padding", culprit="FirstLast")
def last_place_taken_for_the_end() -> Case:
    return tensors(FirstLast(), topic_loss)
