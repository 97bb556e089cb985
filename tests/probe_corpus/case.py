"""A case of the corpus: a model, a loss and a batch as a user brings them, and what is wrong with them."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import Collate

ROWS, WIDTH, CLASSES, WORDS = 8, 4, 3, 11
LENGTHS = (7, 2, 5, 3, 6, 2, 4, 3)
Batch = dict[str, Tensor]
Vectors = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What goes into the self-test, and what must come out.

    Attributes:
        model, loss, batch, collate: as for `ab.Step`; the loss may also return a bare mean.
        kinds: kinds of findings of which one must be made; empty for a sound case.
        culprit: a pattern that the culprit or the text of such a finding must match.
        dtype: in which the case can be run; float32 where the user's own code holds on to it.
    """

    model: nn.Module
    loss: Any
    batch: Any
    collate: Collate | None = None
    kinds: frozenset[str] = frozenset()
    culprit: str = ""
    dtype: torch.dtype = torch.float64


Make = Callable[[], Case]


class Corpus(list[Make]):
    """Cases, each made from a seed of its own, without moving the global stream."""

    def add(self, name: str, make: Make, kinds: str = "", culprit: str = "") -> None:
        """A case by name; kinds are separated by commas."""

        def seeded() -> Case:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(name.encode()))
                return replace(make(), kinds=frozenset(filter(None, kinds.split(", "))), culprit=culprit)

        seeded.__name__ = name
        self.append(seeded)

    def of(self, kinds: str = "", culprit: str = "", **makes: Make) -> None:
        """Cases of one kind by name; the culprit is by default what the case calls its layer."""
        for name, make in makes.items():
            self.add(name, make, kinds, culprit)

    def loss(
        self,
        kinds: str = "",
        culprit: str = "",
        *,
        model: Callable[[], nn.Module],
        batch: Callable[[], Any],
        terms: dict[str, float] | None = None,
        **more: Any,
    ) -> Callable[[Any], Any]:
        """A decorator: the function is the loss of a case of its name; `terms` are its coefficients."""

        def add(function: Any) -> Any:
            loss = function if terms is None else ab.Terms(function, coefficients=terms)
            make = lambda: Case(model=model(), loss=loss, batch=batch(), **more)  # noqa: E731
            self.add(function.__name__, make, kinds, culprit)
            return function

        return add


# ---- rows


def vectors(*shape: int) -> Vectors:
    return torch.randn(ROWS, *(shape or (WIDTH,))), torch.randint(CLASSES, (ROWS,))


def images() -> Vectors:
    return vectors(2, 6, 6)


def numbers(outputs: int = 1) -> Vectors:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, outputs)


def features(**more: Tensor) -> Batch:
    return {"x": torch.randn(ROWS, WIDTH), **more}


def sentences(lengths: Sequence[int] = LENGTHS) -> list[Batch]:
    """A list of samples of unequal length: tokens, a label for each token, a class for the whole."""
    words = lambda length: torch.randint(1, WORDS, (length,))  # noqa: E731
    topic = lambda: torch.randint(CLASSES, ())  # noqa: E731
    return [{"input_ids": words(n), "labels": words(n), "topic": topic()} for n in lengths]


def pad(samples: list[Batch]) -> Batch:
    """Collate sentences to the longest of them: 0 pads tokens, -100 pads labels, the mask says which."""

    def padded(name: str, value: int) -> Tensor:
        rows = [sample[name] for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    input_ids = padded("input_ids", 0)
    topic = torch.stack([sample["topic"] for sample in samples])
    mask = (input_ids != 0).long()
    return {"input_ids": input_ids, "attention_mask": mask, "labels": padded("labels", -100), "topic": topic}


def padded_sentences(lengths: Sequence[int] = LENGTHS) -> Batch:
    return pad(sentences(lengths))


# ---- models and losses that several cases share


def layer(name: str, forward: Callable[..., Tensor], **parts: Any) -> nn.Module:
    """A module of a class of this name that computes a function: of itself, too, if it has parts."""
    made = type(name, (nn.Module,), {"forward": forward if parts else lambda self, x: forward(x)})()
    for key, part in parts.items():
        made.register_buffer(key, part) if isinstance(part, Tensor) else setattr(made, key, part)
    return made


def mlp(*middle: nn.Module, outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), *middle, nn.Linear(6, outputs))


def classifier(*middle: nn.Module) -> Case:
    return Case(model=mlp(*middle), loss=nn.CrossEntropyLoss(), batch=vectors())


def regression(*middle: nn.Module, outputs: int = 1) -> Case:
    return Case(model=mlp(*middle, outputs=outputs), loss=nn.MSELoss(), batch=numbers(outputs))


def of_series(model: nn.Module) -> Case:
    """Sequences of equal length, (rows, time, features), to be told apart."""
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=vectors(5, WIDTH))


class Words(nn.Module):
    def __init__(self, forward: Any, outputs: int = WORDS, *, width: int = WIDTH, **layers: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=layers.pop("padding_idx", None))
        for name, one in layers.items():
            self.add_module(name, one)
        self.head, self.compute = nn.Linear(width, outputs), forward

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.compute(self, input_ids, attention_mask)


class Experts(nn.Module):
    """Each row goes to one expert, which sees any number of them; those for which there is no room pass by.

    What an expert draws has as many lines as rows were sent to it.
    """

    def __init__(self, count: int, *, room: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.room = nn.Linear(6, count), room
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout)) for _ in range(count)]
        self.experts = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        shares, room, out = self.gate(x).softmax(dim=1), max(1, int(len(x) * self.room)), x
        for index, expert in enumerate(self.experts):
            sent = (shares.argmax(dim=1) == index).nonzero()[:room, 0]
            out = out.index_add(0, sent, expert(x[sent]) * shares[sent, index, None])
        return out


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).tanh())


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token, 0 where the label is -100: (rows, time)."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def tag_loss(model: nn.Module, micro: Batch) -> ab.Total:
    losses = token_losses(model(micro["input_ids"], attention_mask=micro["attention_mask"]), micro["labels"])
    return ab.Total(losses.sum(), (micro["labels"] != -100).sum())


def topic_loss(model: nn.Module, micro: Batch) -> ab.Total:
    logits = model(micro["input_ids"], micro["attention_mask"])
    return ab.Total(F.cross_entropy(logits, micro["topic"], reduction="sum"), len(logits))


def collated(model: nn.Module, loss: object) -> Case:
    """Padded micro-batch by micro-batch, so the padding changes with the cut."""
    return Case(model=model, loss=loss, batch=sentences(), collate=pad)


def tensors(model: nn.Module, loss: object) -> Case:
    return Case(model=model, loss=loss, batch=padded_sentences())
