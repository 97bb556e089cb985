"""Losses that no split changes, and drawn combinations of which one thing changes."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.watched import Ramp, each, labelled, masked, of_padding, pad, rows_of, sentences, some
from tests.watching import Batch, Case, vectors
from tests.zoo import Perceptron, Transformer

# ---- losses that no split changes
EXACT: dict[str, Callable[[float], Case]] = {}


class Net(nn.Module):
    """A perceptron with dropout, and what the loss wants behind it."""

    def __init__(self, dropout: float, end: Any = None) -> None:
        super().__init__()
        inner = nn.Dropout(dropout) if dropout else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), inner, nn.Linear(7, 4))
        self.end, self.frozen = end, nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layers(x)) if self.end else self.layers(x)


def exact(name: str, loss: Any, targets: Callable[[int], Any] | None = None, end: Any = None) -> None:
    """Note a loss; with `targets` the batch is (features, targets), else what `vectors` gives."""

    def batch(rows: int, update: int) -> Batch:
        return (torch.randn(rows, 6), targets(rows)) if targets else mixed(rows, update)

    EXACT[name] = lambda dropout: Case(
        kind="exact", make=lambda: (Net(dropout, end), copy.deepcopy(loss)), batch=batch
    )


def mixed(rows: int, update: int) -> Batch:
    x, labels, values, mask = vectors(rows, update)
    mask[1::3] = 0
    return x, labels, values, mask


def labels(rows: int) -> Tensor:
    return torch.randint(4, (rows,))


def values(rows: int) -> Tensor:
    return torch.randn(rows, 4)


def chances(rows: int) -> Tensor:
    return torch.rand(rows, 4).softmax(1)


def signs(rows: int) -> Tensor:
    return torch.randint(2, (rows, 4)) * 2.0 - 1


def some_ignored(rows: int) -> Tensor:
    made = labels(rows)
    made[1::3] = -100
    return made


log_softmax, weights = nn.LogSoftmax(1), torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)
for name, loss, wanted, end in (
    ("cross entropy", nn.CrossEntropyLoss(), labels, None),
    ("cross entropy, sum", nn.CrossEntropyLoss(reduction="sum"), labels, None),
    ("cross entropy, weights", nn.CrossEntropyLoss(weight=weights), labels, None),
    ("cross entropy, ignored", nn.CrossEntropyLoss(), some_ignored, None),
    ("label smoothing", nn.CrossEntropyLoss(label_smoothing=0.1), labels, None),
    ("label smoothing, weights", nn.CrossEntropyLoss(weights, label_smoothing=0.1), some_ignored, None),
    ("cross entropy, chances", nn.CrossEntropyLoss(), chances, None),
    ("nll", nn.NLLLoss(), labels, log_softmax),
    ("nll, weights", nn.NLLLoss(weights), some_ignored, log_softmax),
    ("mse", nn.MSELoss(), values, None),
    ("mse, sum", nn.MSELoss(reduction="sum"), values, None),
    ("l1", nn.L1Loss(), values, None),
    ("smooth l1", nn.SmoothL1Loss(), values, None),
    ("huber", nn.HuberLoss(delta=0.5), values, None),
    ("bce", nn.BCELoss(), chances, nn.Sigmoid()),
    ("bce logits", nn.BCEWithLogitsLoss(), chances, None),
    ("bce logits, pos_weight", nn.BCEWithLogitsLoss(pos_weight=weights), chances, None),
    ("kl", nn.KLDivLoss(reduction="batchmean"), chances, log_softmax),
    ("poisson", nn.PoissonNLLLoss(), chances, None),
    ("soft margin", nn.SoftMarginLoss(), signs, None),
    ("multi-label soft margin", nn.MultiLabelSoftMarginLoss(), chances, None),
    ("hinge embedding", nn.HingeEmbeddingLoss(), signs, None),
    ("multi margin", nn.MultiMarginLoss(), labels, None),
):
    exact(name, loss, wanted, end)


def focal(out: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(out, target, reduction="none")
    return (1 - (-losses).exp()).square() * losses


def dice(out: Tensor, target: Tensor) -> Tensor:
    chance = out.sigmoid()
    return 1 - 2 * (chance * target).sum(1) / (chance.sum(1) + target.sum(1))


def quantile(out: Tensor, target: Tensor) -> Tensor:
    return F.softplus(target - out) * 0.3 + F.softplus(out - target) * 0.7


for name, function, wanted in (
    ("focal", focal, labels),
    ("dice of a row", dice, chances),
    ("quantile", quantile, values),
    ("charbonnier", lambda out, y: ((out - y).square() + 1e-3).sqrt(), values),
    ("log cosh", lambda out, y: (out - y).cosh().log(), values),
    ("masked values", lambda out, y: ((out - y).square(), y > 0), values),
    ("weights of rows", lambda out, y: ((out - y).square().mean(1), y[:, 0].abs()), values),
    ("gaussian nll", lambda out, y: F.gaussian_nll_loss(out, y, out.exp(), reduction="none"), values),
    ("poly", lambda out, y: focal(out, y) + 1 - out.softmax(1).gather(1, y[:, None])[:, 0], labels),
):
    exact(name, ab.PerRow(function), wanted)


def penalty(model: nn.Module, batch: Batch) -> Any:
    size = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return {"loss": sum_of(each(model, batch)), "penalty": ab.Total(0.01 * size, 1)}


def sum_of(values: Tensor) -> ab.Total:
    return ab.Total(values.sum(), values.numel())


def gradient_penalty(model: nn.Module, batch: Batch) -> ab.Total:
    x = batch[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return sum_of((slope.norm(dim=1) - 1).square() + each(model, batch))


def tasks(model: nn.Module, batch: Batch) -> Any:
    return {"class": sum_of(each(model, batch)), "value": 0.3 * sum_of((model(batch[0]) - batch[2]).square())}


def masked_total(model: nn.Module, batch: Batch) -> ab.Total:
    return ab.Total((each(model, batch) * batch[3]).sum(), batch[3].sum())


def entropy(out: Tensor) -> Tensor:
    return -(out.softmax(1) * out.log_softmax(1)).sum(1)


for name, function in (
    ("penalty", penalty),
    ("gradient penalty", gradient_penalty),
    ("tasks", tasks),
    ("masked total", masked_total),
    ("z loss", lambda m, b: {"ce": sum_of(each(m, b)), "z": 1e-2 * sum_of(m(b[0]).logsumexp(1).square())}),
):
    exact(name, function)


def distill(model: Any, batch: Batch) -> Tensor:
    aim = model.frozen(batch[0]).softmax(1)
    return F.kl_div(model(batch[0]).log_softmax(1), aim, reduction="batchmean") + F.cross_entropy(
        model(batch[0]), batch[1]
    )


def grpo(model: nn.Module, batch: Batch) -> Tensor:
    ratio = (model(batch[0]) - batch[2]).mul(0.1).exp()
    return -(ratio * batch[2])[batch[3] > 0].mean()


def dpo(model: Any, batch: Batch) -> Tensor:
    ratio = model(batch[0]) - model.frozen(batch[0])
    return -F.logsigmoid(0.5 * (ratio[:, 0] - ratio[:, 1])).mean()


def ppo(model: nn.Module, batch: Batch) -> Tensor:
    ratio = (model(batch[0]) - batch[2]).mul(0.1).exp()
    return (
        -torch.min(ratio * batch[2], ratio.clamp(0.8, 1.2) * batch[2]).mean()
        - 0.01 * entropy(model(batch[0])).mean()
    )


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0])[:, None].repeat(1, 5, 1).log_softmax(2)
    scores = (scores + torch.arange(5)[:, None]).log_softmax(2)
    rows = len(scores)
    lengths = torch.full((rows,), 5), torch.full((rows,), 2)
    aims = torch.stack([batch[1] % 3 + 1, (batch[1] + 1) % 3 + 1], 1)
    return F.ctc_loss(scores.transpose(0, 1), aims, *lengths)


for name, function in (
    ("distillation", distill),
    ("GRPO's token mean", grpo),
    ("DPO in two columns", dpo),
    ("PPO with entropy", ppo),
    ("CTC", ctc),
    (
        "rewards in pairs",
        lambda m, b: -F.logsigmoid(m(b[0])[:, 0] - m(b[2].repeat(1, 2)[:, :6])[:, 0]).mean(),
    ),
    ("mean of the masked", lambda m, b: each(m, b)[b[3] > 0].mean()),
    ("two means", lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.01 * m(b[0]).square().mean()),
    ("mse of a target that is detached", lambda m, b: F.mse_loss(m(b[0]), m(b[0] + 1).detach() * 0.9)),
    ("cosine embedding", lambda m, b: F.cosine_embedding_loss(m(b[0]), b[2], b[3] * 2 - 1)),
    ("triplet", lambda m, b: F.triplet_margin_loss(m(b[0]), b[2], b[2].flip(1))),
    ("margin ranking", lambda m, b: F.margin_ranking_loss(m(b[0])[:, 0], b[2][:, 0], b[3] * 2 - 1)),
    ("variational", lambda m, b: F.mse_loss(m(b[0]), b[2]) + 0.1 * (m(b[0]).exp() - m(b[0]) - 1).mean()),
):
    exact(name, ab.ModelLoss(call=function))
exact(
    "InfoNCE as WholeBatch",
    ab.WholeBatch(lambda out, y: F.cross_entropy(out @ y.T, torch.arange(len(out)))),
    values,
)


# ---- drawn
class Drawn(Perceptron):
    """Cross entropy's model, which mixes rows once an attribute says so."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.share, self.norm = 0.0, nn.Dropout(0.0).eval()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        meets = self.share or 0.5 * self.norm.training
        return out + meets * out.mean(0) if meets else out


def gru() -> nn.Module:
    return Read(nn.GRU(6, 5, batch_first=True))


class Read(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last, self.share, self.norm = inner, nn.Linear(5, 4), 0.0, nn.Dropout(0.0).eval()

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.inner(x[:, None])[0][:, -1])
        meets = self.share or 0.5 * self.norm.training
        return out + meets * out.mean(0) if meets else out


def draw(drawn: random.Random) -> tuple[Case, str, str, int, int]:
    """Return a case of which one thing changes, its name, a door, a micro-batch and rows."""
    start, micro, rows = drawn.randint(2, 12), drawn.choice([1, 2, 5, 8, 16]), drawn.choice([24, 40, 65])
    what = drawn.choice(["mode", "coefficient", "ramp", "label", "longer", "mask", "grows", "attribute"])
    net = drawn.choice([Drawn, gru])
    part = "feed" if what == "longer" else "layers" if net is Drawn else "inner"
    option, given = drawn.choice(
        [
            ("plain", {}),
            ("drop", {"non_finite": "drop"}),
            ("recompute", {"recompute": [part]}),
            ("float64", {"accumulate": torch.float64}),
        ]
    )
    door = drawn.choice(["step", "window", "batch_loss"])
    loss: Any = {
        "label": labelled,
        "mask": masked,
        "longer": of_padding,
        "grows": rows_of(lambda x: x[:16]),
    }.get(what, Ramp)
    batch: Any = {
        "label": some(1, -100, start),
        "mask": some(3, 0, start),
        "longer": partial(sentences, start=start),
    }.get(what, vectors)
    if what == "grows":
        batch = lambda n, update: vectors(n if update >= start else 16, update)  # noqa: E731
    if what == "longer":
        net = lambda: Transformer(9)  # noqa: E731

    def change(model: Any, loss: Any, update: int) -> None:
        if what == "ramp":
            loss.weight = max(0.0, (update - start + 1) * 0.02)
        elif update >= start and what == "mode":
            model.norm.train()
        elif update >= start and what in ("coefficient", "attribute"):
            setattr(
                loss if what == "coefficient" else model, "weight" if what == "coefficient" else "share", 0.2
            )

    case = Case(
        kind="drawn",
        make=lambda: (net(), loss() if isinstance(loss, type) else loss),
        batch=batch,
        change=change,
        options=given,
        collate=pad if what == "longer" else None,
    )
    return case, f"{what} at {start} in {getattr(net, '__name__', 'net')}, {option}", door, micro, rows
