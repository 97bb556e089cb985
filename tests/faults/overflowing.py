"""Gradients that overflow float16 at a large loss scale, rows that are not finite, and their steps."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Precision, Step, StepReport, Terms, Total
from tests.laws.check import parts

ROWS, FEATURES, CLASSES, SIZE = 32, 6, 4, 4  # eight micro-batches of four rows
THIRD = range(8, 12)
LARGEST = torch.finfo(torch.float16).max
FIRST = 2.0**10  # a gradient that is not divided yet overflows at the 2^16 where scales begin

MIXED = Precision(compute="float16", loss_scale=FIRST)
TRUE = Precision(store="float16", loss_scale=FIRST)
PRECISIONS: dict[str, Any] = {
    "mixed": "fp16-mixed",
    "true": "fp16-true",
    "mixed, fixed": MIXED,
    "true, fixed": TRUE,
}


class Overflow(torch.autograd.Function):
    """The identity. Its backward multiplies the gradient of marked rows by 2^power, and divides it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor, net: "Net") -> Tensor:
        ctx.net = net
        ctx.save_for_backward(marked)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (marked,) = ctx.saved_tensors
        net = ctx.net
        net.largest = max(net.largest, (gradient.double().abs() * marked).max().item())
        factor = torch.where(marked, 2.0**net.power, 1.0).double()
        large = (gradient * factor).to(gradient.dtype)  # infinite, where it does not fit
        spoil = torch.where(marked, net.spoil, 1.0).to(gradient.dtype)
        return (large / factor).to(gradient.dtype) * spoil, None, None


def _told(name: str) -> Any:
    return property(lambda net: getattr(net.told, name), lambda net, value: setattr(net.told, name, value))


class Net(nn.Module):
    """Rows are marked in their last column, which takes no other part.

    Attributes:
        power: what the gradient of marked rows is multiplied by on its way, as a power of two.
        spoil: what it is multiplied by for good.
        largest: the largest gradient of marked rows so far.
        ran: rows of each forward.
    """

    power, spoil, largest, ran = map(_told, ("power", "spoil", "largest", "ran"))

    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.norm: nn.Module = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.told = SimpleNamespace(power=0, spoil=1.0, largest=0.0, ran=[])  # no snapshot puts it back

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(len(x))
        self.seen += len(x)
        hidden = Overflow.apply(self.enter(x[:, :-1]), x[:, -1:] != 0, self)
        return self.leave(self.drop(torch.tanh(self.norm(hidden))))


def fit(model: nn.Module, micro: Any) -> Total:
    losses = F.cross_entropy(model(micro[0]).float(), micro[1], reduction="none")
    return Total(losses.sum(), len(losses))


def terms(model: nn.Module, micro: Any) -> dict[str, Total]:
    """Two terms that go through the marked rows, with weights of their own."""
    outputs = model(micro[0]).float()
    losses = F.cross_entropy(outputs, micro[1], reduction="none")
    first = micro[1] == 0
    return {
        "fit": Total(losses.sum(), len(losses)),
        "size": Total(outputs.square().sum(), outputs.numel()),
        "first": Total(losses[first].sum(), int(first.sum())),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "divided early": {},
    "divided late": {"loss": fit},
    "several terms": {"loss": Terms(terms, coefficients={"size": 0.25, "first": 2.0})},
    "compensated": {"compensated": True},
    "float64 sums": {"accumulate": torch.float64},
    "dropout": {"dropout": 0.5},
    "BatchNorm": {"norm": True, "batch_norm": "micro"},
    "clipped": {"clip_norm": 0.01},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
}


def make(name: str = "divided early", **options: Any) -> Step:
    """A step with momentum and a scheduler, the same one every time."""
    options = OPTIONS[name] | options
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    model = Net(options.pop("dropout", 0.0), norm=options.pop("norm", False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    options = {"micro_batch": SIZE, "scheduler": scheduler, "check": False} | options
    step = Step(model, options.pop("loss", nn.CrossEntropyLoss()), optimizer, **options)
    if step.scale.is_dynamic:
        step.scale.load({"value": FIRST, "clean": 0})
    return step


def make_batch(
    marked: Sequence[int] = THIRD, rows: int = ROWS, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES + 1, generator=generator).to(dtype)
    x[:, -1] = 0
    x[list(marked), -1] = 1
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def take(step: Step, batch: Any, *, windowed: bool = False, size: int = SIZE) -> StepReport:
    """One update, from one random state, whole or micro-batch by micro-batch."""
    torch.manual_seed(3)
    if not windowed:
        return step(batch)
    rows = len(batch[0])
    window = step.window()
    for micro in parts(batch, [min(size, rows - start) for start in range(0, rows, size)]):
        window.add(micro)
    return window.close()


def plant(step: Step, largest: float, halvings: int) -> None:
    """Let marked rows overflow at the scale at which their gradient was this large, and so often."""
    step.model.power = math.floor(math.log2(LARGEST / largest)) + halvings


def weights(step: Step) -> dict[str, Tensor]:
    """As the optimizer knows them, in the widest dtype they have."""
    found = {}
    for name, parameter in step.model.named_parameters():
        full = step.masters.of(parameter)
        found[name] = (parameter.detach() if full is None else full).clone()
    return found


def moved(step: Step, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() - before[name].double() for name, value in weights(step).items()}
