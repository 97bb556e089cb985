"""Rows for the corpus, and the few models that several cases share."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, CLASSES, WORDS = 8, 4, 3, 11
LENGTHS = (7, 2, 5, 3, 6, 2, 4, 3)
Batch = dict[str, Tensor]


def vectors(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Features and classes."""
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def numbers(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Features and a number to be predicted."""
    return torch.randn(rows, WIDTH), torch.randn(rows, 1)


def images(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Small pictures and classes."""
    return torch.randn(rows, 2, 6, 6), torch.randint(CLASSES, (rows,))


def series(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Sequences of equal length, (rows, time, features), and classes."""
    return torch.randn(rows, 5, WIDTH), torch.randint(CLASSES, (rows,))


def sentences(lengths: Sequence[int] = LENGTHS) -> list[Batch]:
    """A list of samples of unequal length: tokens, a label for each token, a class for the whole."""
    return [
        {
            "input_ids": torch.randint(1, WORDS, (length,)),
            "labels": torch.randint(1, WORDS, (length,)),
            "topic": torch.randint(CLASSES, ()),
        }
        for length in lengths
    ]


def pad(samples: list[Batch]) -> Batch:
    """Collate sentences to the longest of them: 0 pads tokens, -100 pads labels, the mask says which."""

    def padded(name: str, value: int) -> Tensor:
        rows = [sample[name] for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    input_ids = padded("input_ids", 0)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": padded("labels", -100),
        "topic": torch.stack([sample["topic"] for sample in samples]),
    }


def padded_sentences(lengths: Sequence[int] = LENGTHS) -> Batch:
    """Sentences padded once, all to the same length."""
    return pad(sentences(lengths))


def repad(batch: Batch) -> Batch:
    """Other words where the padding was; mask and labels stay."""
    return batch | {"input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 5)}


def mlp(*middle: nn.Module, outputs: int = CLASSES) -> nn.Sequential:
    """A perceptron with something in the middle."""
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), *middle, nn.Linear(6, outputs))


class Tagger(nn.Module):
    """Each token by itself: no token sees another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).tanh())


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token, 0 where the label is -100: (rows, time)."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def inputs_of(micro: Batch) -> Any:
    """What a model of sentences takes."""
    return {"input_ids": micro["input_ids"], "attention_mask": micro["attention_mask"]}
