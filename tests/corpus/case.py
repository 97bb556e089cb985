"""A case of the corpus: a model, a loss and a batch as a user brings them, and what is wrong with them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import Collate
from tests.zoo import CLASSES, FEATURES, WORDS

ROWS, WIDTH = 8, 4
LENGTHS = (7, 2, 5, 3, 6, 2, 4, 3)
DOORS = ("step", "window", "batch_loss")
Batch = dict[str, Tensor]
Vectors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What goes into a step or the self-test, and what must come out."""

    model: nn.Module
    loss: Any  # it may also return a bare mean
    batch: Any  # or a function of the update's number
    collate: Collate | None = None
    change: Callable[[Any, Any, int], None] = lambda model, loss, update: None  # before each update
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    doors: tuple[str, ...] = DOORS
    kinds: frozenset[str] = frozenset()  # of findings, of which the self-test must make one
    culprit: str = ""  # a pattern for the culprit or the text of such a finding
    says: str = ""  # a pattern for what a door says, if it is not exact
    is_warned: bool = False  # although it is sound, because numbers that are drawn cannot be replayed
    dtype: torch.dtype = torch.float64  # float32 where the user's own code holds on to it

    def rows_of(self, update: int) -> Any:
        return self.batch(update) if callable(self.batch) else self.batch


Make = Callable[[], Case]


class Corpus(dict[str, Make]):
    """Cases by name, each made from a seed of its own, without moving the global stream."""

    def of(self, kinds: str = "", culprit: str = "", says: str = "", /, **makes: Make) -> None:
        """Note cases; kinds are separated by commas."""
        for name, make in makes.items():

            def seeded(name: str = name, make: Make = make) -> Case:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(zlib.crc32(name.encode()))
                    found = frozenset(filter(None, kinds.split(", ")))
                    return replace(make(), kinds=found, culprit=culprit, says=says)

            self[name] = seeded

    def loss(self, *told: str, model: Any = None, batch: Any = None, name: str = "", **more: Any) -> Any:
        """A decorator: the function is the loss of a case of its name, or another; `told` as in `of`."""

        def add(function: Any) -> Any:
            make = lambda: Case(model=(model or mlp)(), loss=function, batch=(batch or vectors)(), **more)  # noqa: E731
            self.of(*told, **{name or function.__name__: make})
            return function

        return add


def vectors(*shape: int, rows: int = ROWS) -> Vectors:
    return torch.randn(rows, *(shape or (FEATURES,))), torch.randint(CLASSES, (rows,))


def columns(rows: int = ROWS) -> Vectors:
    """Features, classes, values, and a mask of which each third is 0."""
    return *vectors(rows=rows), torch.randn(rows, CLASSES), (torch.arange(rows) % 3 != 1) * torch.ones(rows)


def features(**more: Tensor) -> Batch:
    return {"x": torch.randn(ROWS, FEATURES), **more}


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


def layer(name: str, forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module of a class of this name that computes a function: of itself, too, if it has parts."""
    made = type(name, (nn.Module,), {"forward": forward if parts else lambda self, x: forward(x)})()
    for key, part in parts.items():
        made.register_buffer(key, part) if isinstance(part, Tensor) else setattr(made, key, part)
    return made


def mlp(*middle: nn.Module, outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), *middle, nn.Linear(6, outputs))


def classifier(*middle: nn.Module, **more: Any) -> Case:
    return Case(model=mlp(*middle), loss=nn.CrossEntropyLoss(), **{"batch": vectors(), **more})


def regression(*middle: nn.Module) -> Case:
    return Case(model=mlp(*middle), loss=nn.MSELoss(), batch=columns()[::2])


def words(forward: Any, outputs: int = WORDS, *, width: int = WIDTH, **layers: Any) -> nn.Module:
    """A model of (input_ids, attention_mask) with an embedding and a head."""
    embedding = nn.Embedding(WORDS, WIDTH, padding_idx=layers.pop("padding_idx", None))
    compute = lambda self, input_ids, attention_mask: forward(self, input_ids, attention_mask)  # noqa: E731
    return layer("Words", compute, embedding=embedding, head=nn.Linear(width, outputs), **layers)


class Experts(nn.Module):
    """Each row goes to one expert, which sees any number of them; without room it passes by."""

    def __init__(self, count: int, *, room: float = 1.0, least: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.room, self.least = nn.Linear(6, count), room, least
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout)) for _ in range(count)]
        self.experts = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        shares, room, out = self.gate(x).softmax(dim=1), max(self.least, int(len(x) * self.room)), x
        for index, expert in enumerate(self.experts):
            sent = (shares.argmax(dim=1) == index).nonzero()[:room, 0]
            out = out.index_add(0, sent, expert(x[sent]) * shares[sent, index, None])
        return out


def tagger() -> nn.Module:
    forward = lambda self, input_ids, **_: self.head(self.embedding(input_ids).tanh())  # noqa: E731
    return layer("Tagger", forward, embedding=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, WORDS))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token, 0 where the label is -100: (rows, time)."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def tag_loss(model: nn.Module, micro: Batch) -> ab.Total:
    losses = token_losses(model(micro["input_ids"], attention_mask=micro["attention_mask"]), micro["labels"])
    return ab.Total(losses.sum(), (micro["labels"] != -100).sum())


def topic_loss(model: nn.Module, micro: Batch) -> ab.Total:
    logits = model(micro["input_ids"], micro["attention_mask"])
    return ab.Total(F.cross_entropy(logits, micro["topic"], reduction="sum"), len(logits))


def each(model: nn.Module, micro: Vectors, *_: Any) -> Tensor:
    """The loss of each row."""
    return F.cross_entropy(model(micro[0]), micro[1], reduction="none")


def summed(values: Tensor) -> ab.Total:
    return ab.Total(values.sum(), values.numel())


def collated(model: nn.Module, loss: object) -> Case:
    """Padded micro-batch by micro-batch, so the padding changes with the cut."""
    return Case(model=model, loss=loss, batch=sentences(), collate=pad)


def tensors(model: nn.Module, loss: object) -> Case:
    return Case(model=model, loss=loss, batch=padded_sentences())
