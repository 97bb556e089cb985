"""Cases that are exact until an update from which rows meet or weights are wrong."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.corpus.case import Case, Vectors, columns, layer, mlp
from tests.corpus.faults import first_16, masked_mean
from tests.zoo import WORDS, Perceptron, Transformer

LATER: dict[str, Callable[[int], Case]] = {}  # called with the update from which it is wrong
AT_ONCE = set[str]()  # found at that update; the rest at the next power of two
TABLE = {"share": 0.0}


class Ramp:
    """Cross entropy plus a term in which rows meet, by attributes that change."""

    def __init__(self) -> None:
        self.weight, self.mode, self.count = 0.0, "plain", 0

    def __call__(self, model: nn.Module, batch: Vectors) -> ab.Total:
        out, rows = model(batch[0]), len(batch[0])
        share = self.weight or float(self.mode == "contrast" or self.count > 0)
        meet = out.mean(0).square().sum() * rows if share else 0.0
        return ab.Total(F.cross_entropy(out, batch[1], reduction="sum") + share * meet, rows)


def scoped(model: nn.Module, batch: Vectors) -> ab.Total:
    """A function that reads a table of its module."""
    out = model(batch[0])
    return ab.Total(out.square().sum() + len(out) * TABLE["share"] * out.mean(0).square().sum(), len(out))


def meeting() -> nn.Module:
    """A perceptron that adds the mean of its rows if an attribute or the mode of a layer says so."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.layers(x)
        share = self.share or 0.5 * self.inner.training
        return out + share * out.mean(0) if share else out

    return layer("Meeting", forward, layers=mlp(), inner=layer("Mode", lambda x: x).eval(), share=0.0)


def changing(what: Callable[[Any, Any, int], Any]) -> Callable[[int], Case]:
    """A change of model and loss, by how many updates have been wrong."""

    def make(start: int) -> Case:
        def change(model: Any, loss: Any, update: int) -> None:
            TABLE["share"] = 0.0 if update < start else TABLE["share"]
            if update >= start:
                what(model, loss, update - start + 1)

        loss = scoped if what is table else Ramp()
        return Case(model=meeting(), loss=loss, batch=lambda _: columns(40), change=change)

    return make


def table(model: Any, loss: Any, wrong: int) -> None:
    TABLE["share"] = 9.0


def from_then(column: int, value: float, loss: Any) -> Callable[[int], Case]:
    """A value that a column has only later; the first row of all is kept, and of each part another."""

    def make(start: int) -> Case:
        def batch(update: int) -> Vectors:
            made = columns(40)
            made[3].fill_(1)
            made[column][made[column] == value] = 1
            if update >= start:
                made[column][1::3] = value
            return made

        return Case(model=Perceptron(), loss=loss, batch=batch)

    return make


def labelled(model: nn.Module, batch: Vectors) -> ab.Total:
    return ab.Total(F.cross_entropy(model(batch[0]), batch[1]) * len(batch[0]), len(batch[0]))


def of_padding(model: nn.Module, batch: Vectors) -> ab.Total:
    scores = model(batch[0][:, :-1])
    losses = F.cross_entropy(scores, batch[0][:, 1:], reduction="none", ignore_index=0)
    return ab.Total(losses.mean() * len(losses), len(losses))


def padded(start: int) -> Case:
    def batch(update: int) -> list[Tensor]:
        lengths = [9 if update >= start and not row else 5 for row in range(40)]
        return [torch.randint(1, WORDS, (length,)) for length in lengths]

    collate = lambda samples: (nn.utils.rnn.pad_sequence(samples, batch_first=True),)  # noqa: E731
    return Case(model=Transformer(), loss=of_padding, batch=batch, collate=collate)


def set_on(name: str, value: Any, *, model: bool = False) -> Callable[[int], Case]:
    return changing(lambda of, loss, wrong: setattr(of if model else loss, name, value))


LATER["coefficient"] = set_on("weight", 0.3)
LATER["string"] = set_on("mode", "contrast")
LATER["attribute of the model"] = set_on("share", 0.2, model=True)
LATER["mode of a layer"] = changing(lambda model, loss, wrong: model.inner.train())
LATER["table of a module"] = changing(table)
LATER["first ignored label"] = from_then(1, -100, labelled)
LATER["first zero of a mask"] = from_then(3, 0, masked_mean)
LATER["padding by collate"] = padded
AT_ONCE.update(LATER)
LATER["more rows"] = lambda start: Case(
    model=Perceptron(),
    loss=first_16,
    batch=lambda update: columns(60 if update >= start else 16),
    doors=("step", "batch_loss"),
)
LATER["ramp"] = changing(lambda model, loss, wrong: setattr(loss, "weight", 0.02 * wrong))
LATER["counter"] = changing(lambda model, loss, wrong: setattr(loss, "count", wrong))
