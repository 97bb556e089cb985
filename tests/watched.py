"""Cases whose result depends on the split, later or from more rows on; tests/watching.py plays them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.watching import Batch, Case, vectors
from tests.zoo import Perceptron, Transformer

CASES: dict[str, Case] = {}


def mlp() -> nn.Module:
    return Perceptron(6, 4)


def classes(rows: int, update: int) -> Batch:
    return vectors(rows, update)[:2]


def of(
    kind: str, name: str, loss: Any, model: Callable[[], nn.Module] = mlp, batch: Any = None, **more: Any
) -> None:
    """Note a case; `loss` is made by `loss()` where it is a class, else shared."""
    batch = batch or (classes if isinstance(loss, nn.Module) else vectors)
    CASES[name] = Case(
        kind=kind, make=lambda: (model(), loss() if isinstance(loss, type) else loss), batch=batch, **more
    )


def each(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean(values: Tensor) -> ab.Total:
    """A mean that is taken too early: times the rows."""
    return ab.Total(values.mean() * len(values), len(values))


def rows_of(part: Callable[[Tensor], Tensor]) -> Any:
    """A loss of some of the rows, divided by how many there are."""

    def loss(model: nn.Module, batch: Batch) -> ab.Total:
        chosen = part(each(model, batch))
        return ab.Total(chosen.sum(), len(chosen))

    return loss


# ---- larger
of("larger", "16 largest", rows_of(lambda x: x.topk(min(16, len(x))).values))
of("larger", "trimmed mean", rows_of(lambda x: x.sort().values[: len(x) - len(x) // 10]))
of("larger", "12 hard at least", rows_of(lambda x: x.topk(min(len(x), max(12, len(x) // 3))).values))
of("larger", "first 16", rows_of(lambda x: x[:16]))


class Router(nn.Module):
    """Two experts with room for 8 rows at least; the rows beyond get nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        chance, room = self.gate(x).softmax(1), max(8, len(x) // 4)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mine = chance.argmax(1) == number
            fits = mine & (mine.cumsum(0) <= room)
            out = out + fits[:, None] * chance[:, number, None] * expert(x)
        return out


of("larger", "router", nn.CrossEntropyLoss(), Router)


def contrast(model: nn.Module, batch: Batch) -> ab.Total:
    scores = model(batch[0]) @ batch[2].T
    return ab.Total(F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores))


def balanced(model: nn.Module, batch: Batch) -> ab.Total:
    weight = (1 / torch.bincount(batch[1], minlength=4).clamp(min=1))[batch[1]]
    return ab.Total((each(model, batch) * weight).sum(), weight.sum())


of("larger", "InfoNCE in small parts", contrast)
of("larger", "class balance", balanced)


# ---- later
class Policy(nn.Module):
    """A policy and its reference, which start equal."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Perceptron(6, 4)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.policy(x).log_softmax(-1) - self.reference(x).log_softmax(-1)


def kto(model: nn.Module, batch: Batch) -> Tensor:
    ratio = model(batch[0])
    reward, kl = ratio[:, 0], ratio[:, 1].mean().clamp(min=0).detach()
    sign = (batch[1] % 2) * 2.0 - 1
    return (1 - torch.sigmoid(5 * sign * (reward - kl))).mean()


of("later", "KTO", ab.ModelLoss(call=kto), Policy)


class Ramp:
    """Cross entropy plus a term in which rows meet, by attributes that change."""

    def __init__(self) -> None:
        self.weight, self.mode, self.epoch, self.is_on = 0.0, "plain", 0, False

    def __call__(self, model: nn.Module, batch: Batch) -> ab.Total:
        out, rows = model(batch[0]), len(batch[0])
        on = self.is_on or self.mode == "contrast" or self.epoch >= 2
        share = self.weight or float(on)
        meet = out.mean(0).square().sum() * rows if share else 0.0
        return ab.Total(F.cross_entropy(out, batch[1], reduction="sum") + share * meet, rows)


def at(update: int, **values: Any) -> Any:
    def change(model: nn.Module, loss: Any, number: int) -> None:
        for name, value in values.items() if number >= update else ():
            setattr(loss, name, value)

    return change


def ramp(model: nn.Module, loss: Any, update: int) -> None:
    loss.weight = max(0.0, (update - 1) * 0.05)


def epoch(model: nn.Module, loss: Any, update: int) -> None:
    loss.epoch = update // 3


def labelled(model: nn.Module, batch: Batch) -> ab.Total:
    return ab.Total(F.cross_entropy(model(batch[0]), batch[1]) * len(batch[0]), len(batch[0]))


def masked(model: nn.Module, batch: Batch) -> ab.Total:
    return ab.Total((each(model, batch) * batch[3]).sum() / batch[3].sum() * len(batch[3]), len(batch[3]))


def some(column: int, value: float, start: int = 5) -> Callable[[int, int], Batch]:
    def batch(rows: int, update: int) -> Batch:
        made = vectors(rows, update)
        if update >= start:  # the first row of all is kept, and of each part of 2, 5, 8 or 16 another
            made[column][1::3] = value
        return made

    return batch


of("later", "ramp", Ramp, change=ramp)
of("later", "weight at 3", Ramp, change=at(3, weight=0.3))
of("later", "string at 4", Ramp, change=at(4, mode="contrast"))
of("later", "flag at 2", Ramp, change=at(2, is_on=True))
of("later", "epoch counter", Ramp, change=epoch)
of("later", "first ignored label", labelled, batch=some(1, -100))
of("later", "first zero of a mask", masked, batch=some(3, 0))
of("later", "batch grows", rows_of(lambda x: x[:16]), batch=lambda rows, n: vectors(16 if n < 4 else rows, n))


class Training(Perceptron):
    """Adds the mean of its rows in training mode."""

    def __init__(self) -> None:
        super().__init__(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + out.mean(0) if self.training else out


of("later", "mode", nn.CrossEntropyLoss(), Training, change=lambda model, loss, n: model.train(n >= 3))


def sentences(rows: int, update: int, start: int = 4) -> list[Tensor]:
    return [torch.randint(1, 9, (9 if update >= start and not row else 5,)) for row in range(rows)]


def pad(samples: list[Tensor]) -> Batch:
    return (nn.utils.rnn.pad_sequence(samples, batch_first=True),)


def of_padding(model: nn.Module, batch: Batch) -> ab.Total:
    scores = model(batch[0][:, :-1])
    losses = F.cross_entropy(scores, batch[0][:, 1:], reduction="none", ignore_index=0)
    return ab.Total(losses.mean() * len(losses), len(losses))


of("later", "padding by collate", of_padding, lambda: Transformer(9), sentences, collate=pad)


# ---- backward is not linear
class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.bend = bend
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.bend(gradient), None


BENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: g.clamp(-2e-3, 2e-3),
    "sign": lambda g: g.sign() * 1e-3,
    "norm of a row": lambda g: g / (1e-3 + g.norm(dim=-1, keepdim=True)),
    "8 bits": lambda g: (g * 2**13).round() / 2**13,
}


class Bend(nn.Module):
    def __init__(self, bend: Callable[[Tensor], Tensor], *, by_hook: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.bend, self.by_hook = nn.Linear(6, 6), Perceptron(6, 4), bend, by_hook

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if not self.by_hook:
            return self.last(Bent.apply(hidden, self.bend))
        if hidden.requires_grad:
            hidden.register_hook(self.bend)
        return self.last(hidden)


for bend, how in BENDS.items():
    for by_hook in (False, True) if bend == "clamp" else (False,):
        make, called = partial(Bend, how, by_hook=by_hook), f"{bend} by a hook" if by_hook else bend
        of("backward-not-linear", called, nn.CrossEntropyLoss(), make, doors=("window",))
        drop = {"non_finite": "drop"}
        doors = ("step", "batch_loss")
        of("backward-not-linear", f"{called}, drop", nn.CrossEntropyLoss(), make, options=drop, doors=doors)


# ---- both sides alike
class Gated(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.last = (
            (nn.GRU(6, 6, batch_first=True) if kind == "GRU" else nn.Linear(6, 12)),
            nn.Linear(6, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x[:, None])[0][:, -1] if self.kind == "GRU" else self.block(x))

    def block(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, :6]


class Chunked(nn.Module):
    """A product whose parts are changed in place, as kernels of torch do."""

    def __init__(self, *, data: bool = False) -> None:
        super().__init__()
        self.inner, self.data = nn.Linear(6, 12), data

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.inner(x).unsafe_chunk(2, 1)
        if self.data:
            left.data.add_(right.data)
            return left.sin()
        return left.add_(right).sin()


def chunked(*, data: bool = False) -> nn.Module:
    return nn.Sequential(Chunked(data=data), nn.Linear(6, 4))


for named, built, pattern in (
    ("GRU", partial(Gated, "GRU"), "inner"),
    ("chunks", chunked, "0"),
    (".data", partial(chunked, data=True), "0"),
):
    selective = {"recompute": {pattern: "selective"}}
    of("both-sides-alike", f"selective {named}", nn.CrossEntropyLoss(), built, options=selective)


# ---- windows
def meet(model: nn.Module, batch: Batch) -> ab.Total:
    out = model(batch[0])
    return ab.Total(out.mean(0).square().sum() * len(out), len(out))


of("windows", "n - 1 and 1", meet, doors=("window",), parts=lambda rows: [rows - 1, 1])
of("windows", "single rows", meet, doors=("window",), parts=lambda rows: [1] * rows)
of("windows", "a single row first", meet, doors=("window",), parts=lambda rows: [1, rows - 1])
of("windows", "zero_grad before the loss", nn.CrossEntropyLoss(), doors=("batch_loss window",))


# ---- teacher in the loss
class Teacher:
    """Moves a teacher in every call; by `.data` or by a closure's cell too."""

    def __init__(self, *, data: bool = False) -> None:
        self.teacher: nn.Module | None = None
        self.data = data

    def __call__(self, model: nn.Module, batch: Batch) -> ab.Total:
        if self.teacher is None:
            self.teacher = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), model.parameters(), strict=True):
                (old.data if self.data else old).lerp_(new.detach(), 0.1)
            aim = self.teacher(batch[0])
        return ab.Total((model(batch[0]) - aim + batch[2]).square().mean(1).sum(), len(aim))


class Center(nn.Module):
    """A center that moves in every forward, as that of DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.lerp_(outputs.mean(0), 0.1)
        return F.mse_loss(outputs - self.center, F.one_hot(targets, 4).to(outputs))


def born(model: nn.Module, loss: Any, update: int) -> None:
    loss.teacher = loss.teacher or copy.deepcopy(model).requires_grad_(False)


of("teacher-in-loss", "momentum teacher", Teacher, change=born)
of("teacher-in-loss", "teacher copied in the first call", Teacher)
of(
    "teacher-in-loss",
    "momentum teacher by .data",
    type("Data", (Teacher,), {"__init__": lambda s: Teacher.__init__(s, data=True)}),
    change=born,
)
of(
    "teacher-in-loss",
    "center",
    ab.ModelLoss(call=lambda model, batch: model[1](model[0](batch[0]), batch[1])),
    lambda: nn.ModuleList([mlp(), Center()]),
)


# ---- draws and mixes
def mixup(model: nn.Module, batch: Batch) -> ab.Total:
    other = torch.randperm(len(batch[0]))
    return ab.Total(
        (model(0.7 * batch[0] + 0.3 * batch[0][other]) - batch[2]).square().mean(1).sum(), len(other)
    )


def negatives(model: nn.Module, batch: Batch) -> ab.Total:
    out = model(batch[0])
    other = out[torch.randint(len(out), (len(out),))]
    return ab.Total(F.softplus((out * other).sum(1) - (out * batch[2]).sum(1)).sum(), len(out))


class LayerDrop(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if torch.rand(()) < 0.5 else self.layers(x) * 0.5 + x[:, :4]


of("draws-and-mixes", "mixup", mixup)
of("draws-and-mixes", "random negatives", negatives)
of("draws-and-mixes", "LayerDrop", nn.CrossEntropyLoss(), lambda: LayerDrop(6, 4))

# ---- the figure
of("figure", "ce + 3", ab.ModelLoss(call=lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 3), is_figure=True)
of(
    "figure",
    "2 - 2 * cos",
    ab.ModelLoss(call=lambda m, b: 2 - 2 * F.cosine_similarity(m(b[0]), b[2]).mean()),
    is_figure=True,
)
