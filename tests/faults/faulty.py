"""Small models in which a fault can be planted, their steps, and what such a step may change."""

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.testing import relative_error, tolerance
from tests.snapshots import changes, snapshot

FEATURES, CLASSES, SIZE, ROWS = 8, 4, 4, 16  # powers of two, so that early and late division agree to the bit
BEGIN = 100  # of the random streams
LARGE = (64 << 18) + 64  # float32 numbers that take more than 64 MiB


class Fault:
    """What goes wrong, and where. A plain object, so that no snapshot of modules holds its counter.

    Attributes:
        place: "forward", "mid" (in backward, when later layers have their gradients) or "end" (before any).
        at: how often the place is passed before.
        times: how often it goes wrong.
        what: an error to raise, or what gradients are multiplied by.
        spoils: whether the gradient of marked rows is NaN, every time.
    """

    def __init__(self) -> None:
        self.spoils = False
        self.arm("")

    def arm(self, place: str, at: int = 0, what: BaseException | float = 1.0, times: float = 1) -> None:
        self.place, self.at, self.what, self.times, self.passed = place, at, what, times, 0

    def __call__(self, place: str) -> float:
        if place != self.place:
            return 1.0
        self.passed += 1
        if not self.at < self.passed <= self.at + self.times:
            return 1.0
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what


class Spot(torch.autograd.Function):
    """The identity; its backward is where a fault may be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor, fault: Fault, place: str) -> Tensor:
        ctx.fault, ctx.place = fault, place
        ctx.save_for_backward(marked)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0] * ctx.fault(ctx.place)
        if ctx.fault.spoils:
            gradient = torch.where(ctx.saved_tensors[0], math.nan, gradient)
        return gradient, None, None, None


class Net(nn.Module):
    """Two layers and more. Rows are marked in their last column, which takes no other part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fault = kind, Fault()
        self.enter, self.leave = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.inner = self.enter if kind == "tied" else nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES) if kind == "frozen BatchNorm" else nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.large = nn.Parameter(torch.zeros(LARGE if kind == "large" else CLASSES))
        self.calls, self.log, self.table, self.last = 0, [0], {"rows": 0}, torch.zeros(())

    def count(self, x: Tensor) -> None:
        """Change a buffer, and attributes of every kind."""
        self.seen += len(x)
        self.calls += 1
        self.log.append(len(x))
        self.table["rows"] += len(x)
        self.last = x.detach().mean()
        self.new = self.calls

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, -1:] != 0
        if self.kind == "counting":
            self.count(x)
        hidden = torch.tanh(self.enter(x[:, :-1]))
        if self.kind == "drawing":
            hidden = hidden * (1 + random.random()) * (1 + np.random.rand())
        self.fault("forward")
        hidden = Spot.apply(hidden, marked, self.fault, "mid")
        hidden = self.drop(self.norm(torch.tanh(self.inner(hidden))))
        return Spot.apply(self.leave(hidden) + self.large[:CLASSES], marked, self.fault, "end")


ZOO: dict[str, dict[str, Any]] = {
    "dropout": {},
    "counting": {},
    "drawing": {},
    "tied": {},
    "frozen BatchNorm": {"batch_norm": "frozen"},
    "float64 sums": {"accumulate": torch.float64},
    "compensated": {"compensated": True},
}


def spread(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss in which rows meet."""
    return F.cross_entropy(outputs @ outputs.T, target)


def build(kind: str, *, dtype: torch.dtype = torch.float32, warm: int = 0, **options: Any) -> ab.Step:
    """A step, the same one every time, after some updates.

    Args:
        kind: of the zoo.
        dtype: of the model.
        warm: how many updates.
        options: of the step; `momentum` for the optimizer.
    """
    torch.manual_seed(0)
    model = Net(kind).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=options.pop("momentum", 0.9))
    loss = options.pop("loss", nn.CrossEntropyLoss())
    options = {"micro_batch": SIZE, "check": False} | ZOO.get(kind, {}) | options
    step = ab.Step(model, loss, options.pop("optimizer", optimizer), **options)
    for index in range(warm):
        seed(index)
        step(make_batch(index, dtype=dtype))
    seed(BEGIN)
    return step


def make_batch(
    index: int = 10, rows: int = ROWS, dtype: torch.dtype = torch.float32, marked: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(rows, FEATURES + 1, generator=generator, dtype=dtype)
    x[:, -1] = 0
    x[list(marked), -1] = 1
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def parts(batch: tuple[Tensor, Tensor], sizes: Sequence[int] | int = SIZE) -> list[tuple[Tensor, Tensor]]:
    sizes = sizes if isinstance(sizes, int) else list(sizes)
    return list(zip(*(one.split(sizes) for one in batch), strict=True))


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def everything(step: ab.Step) -> dict[str, Any]:
    """All that a step may change: parameters, buffers, gradients, optimizers, streams, attributes."""
    state = snapshot(step) | {"random state of Python": random.getstate()}
    state["random state of NumPy"] = [str(one) for one in np.random.get_state()]
    for name, module in step.model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "fault":
                state[f"attribute {name}.{key}"] = copy.deepcopy(value)
    return state


def windowed(step: ab.Step, batch: tuple[Tensor, Tensor], cut: Sequence[int]) -> ab.StepReport:
    with step.window() as window:
        for micro in parts(batch, cut):
            window.add(micro)
        return window.close()


def by_hand(
    step: ab.Step, batch: tuple[Tensor, Tensor], cut: Sequence[int], clip_norm: float | None = None
) -> None:
    """The loop that the library replaces; gradients that are there are added to."""
    model, optimizer = step.model, step.optimizers[0]
    model.norm.eval()
    for x, y in parts(batch, cut):
        (F.cross_entropy(model(x), y, reduction="sum") / len(batch[0])).backward()
    model.norm.train()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()


def assert_as_unfaulted(
    step: ab.Step,
    report: ab.StepReport,
    twin: ab.Step,
    batch: tuple[Tensor, Tensor],
    *,
    reordered: bool = False,
) -> None:
    """All is as in the twin, which begins where the step began, and does the same cut without a fault.

    An `add` of a window that came in halves is merged as one: its additions are in another order.
    """
    found = everything(step)
    seed(BEGIN)
    if isinstance(step.loss, ab.WholeBatch):  # no window takes it; both passes draw as they are cut
        twin.micro_batch = max(report.cut)
        other = twin(batch)
        assert other.cut == report.cut
    else:
        other = windowed(twin, batch, report.cut)
    assert other.redone == 0
    expected = everything(twin)
    if reordered:
        names = [name for name, value in expected.items() if isinstance(value, Tensor)]
        pairs = [(found.pop(name), expected.pop(name)) for name in names if name.startswith("parameter")]
        found.pop("optimizer 0"), expected.pop("optimizer 0")
        error = relative_error([one for one, _ in pairs], [other for _, other in pairs])
        assert error <= tolerance(torch.float32, 8)
    assert_same(expected, found)
    assert (report.loss, report.weights, report.rows) == (other.loss, other.weights, other.rows)
    assert (report.updated, report.dropped) == (True, 0)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    different = changes(one, other)
    assert not different, f"not the same: {different}"


def said(error: BaseException | None) -> str:
    """What an error says, with its notes and those it was raised from."""
    if error is None:
        return ""
    notes = getattr(error, "__notes__", [])
    return "\n".join([str(error), *notes, said(error.__cause__)])
