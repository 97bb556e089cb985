"""Small models in which a fault can be planted, their steps, and what such a step may change."""

import math
import os
import random
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

import anybatch as ab
from anybatch.engine import Part, admit, carry_out
from anybatch.testing import relative_error, tolerance
from tests.options import flat
from tests.snapshots import assert_same, seed, snapshot
from tests.train.runs import listening

FEATURES, CLASSES, SIZE, ROWS = 8, 4, 4, 16  # powers of two, so that early and late division agree to the bit
BEGIN = 100  # of the random streams
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


class Fault:
    """What goes wrong, and where. A plain object, so that no snapshot of modules holds its counters."""

    def __init__(self) -> None:
        self.power = 0  # of two, which the gradient of marked rows is multiplied by on its way
        self.spoil = 1.0  # what it is multiplied by for good
        self.largest = 0.0  # of marked rows so far
        self.ran: list[int] = []  # rows of each forward
        self.told: list[object] = []
        self.arm("")

    def arm(self, place: str, at: int = 0, what: Any = 1.0, times: float = 1) -> None:
        """Plant one fault: what is raised, multiplies gradients, or is a signal, `at` a place and so often.

        Places of `Net` are "collate", "forward", "loss", "mid" (in backward, when later layers have their
        gradients), "end" (before any), or a class of events.
        """
        self.planted = [(place, at, what, times)]
        self.passed: dict[str, int] = {}
        self.met: list[Any] = []  # planted faults that were met

    def __call__(self, place: str) -> float:
        passed = self.passed[place] = self.passed.get(place, 0) + 1
        factor = 1.0
        for where, at, what, times in self.planted:
            if where == place and at < passed <= at + times:
                self.met.append(what)
                if isinstance(what, BaseException):
                    raise what
                if isinstance(what, signal.Signals):
                    os.kill(os.getpid(), what)
                else:
                    factor *= what
        return factor


class Spot(torch.autograd.Function):
    """The identity; its backward is where a fault may be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor, fault: Fault, place: str) -> Tensor:
        ctx.fault, ctx.place = fault, place
        ctx.save_for_backward(marked)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fault, (marked,) = ctx.fault, ctx.saved_tensors
        gradient = gradients[0] * fault(ctx.place)
        if ctx.place == "mid":
            fault.largest = max(fault.largest, (gradient.double().abs() * marked).max().item())
            if fault.power:  # infinite, where it does not fit
                factor = torch.where(marked, 2.0**fault.power, 1.0).double()
                gradient = ((gradient * factor).to(gradient.dtype) / factor).to(gradient.dtype)
            if fault.spoil != 1.0:
                gradient = torch.where(marked, fault.spoil, gradient)
        return gradient, None, None, None


class Net(nn.Module):
    """Two layers and more. Rows are marked in their last column, which takes no other part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fault = kind, Fault()
        self.enter, self.leave = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.inner = self.enter if kind == "tied" else nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES) if "BatchNorm" in kind else nn.Identity()
        self.drop = nn.Dropout(0.0 if kind in ("plain", "BatchNorm") else 0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.large = nn.Parameter(torch.zeros(CLASSES))
        self.calls, self.log, self.counts, self.last, self.longest = 0, [0], {"rows": 0}, torch.zeros(()), 2

    def count(self, x: Tensor) -> None:
        """Change a buffer, and attributes of every kind; one is a length remembered beside a buffer."""
        self.seen += len(x)
        self.calls += 1
        self.log.append(len(x))
        self.counts["rows"] += len(x)
        self.last = x.detach().mean()
        self.new = self.calls
        if self.longest < 2 * self.calls:
            self.longest, self.table = 2 * self.calls, torch.ones(2 * self.calls)

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, -1:] != 0
        self.fault.ran.append(len(x))
        if self.kind == "counting":
            self.count(x)
        hidden = torch.tanh(self.enter(x[:, :-1]))
        if self.kind == "drawing":
            hidden = hidden * (1 + random.random()) * (1 + np.random.rand())
        self.fault("forward")
        hidden = Spot.apply(hidden, marked, self.fault, "mid")
        hidden = self.drop(self.norm(torch.tanh(self.inner(hidden))))
        return Spot.apply(self.leave(hidden) + self.large, marked, self.fault, "end")


class Head(Net):
    """Computes its own loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(super().forward(x), labels)}


def terms(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
    """Three terms that go through the model, with weights of their own; two of them through marked rows."""
    outputs = model(micro[0]).float()
    losses = F.cross_entropy(outputs, micro[1], reduction="none")
    model.fault("loss")
    first = micro[1] == 0
    return {
        "fit": ab.Total(losses.sum(), len(losses)),
        "size": ab.Total(outputs.square().sum(), outputs.numel()),
        "first": ab.Total(losses[first].sum(), int(first.sum())),
    }


def spread(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss in which rows meet."""
    return F.cross_entropy(outputs @ outputs.T, target)


def collate(samples: list[Any]) -> Any:
    noise = 1 + random.random()
    return torch.stack([x for x, _ in samples]) * noise, torch.stack([y for _, y in samples])


# What a model does in its forward, and what is asked of its step.
ZOO: dict[str, dict[str, Any]] = {
    "dropout": {},
    "counting": {},
    "drawing": {},
    "tied": {},
    "frozen BatchNorm": {"batch_norm": "frozen"},
    "float64 sums": {"accumulate": torch.float64},
}
# Losses and ways to add up.
VARIANTS: dict[str, dict[str, Any]] = {
    "divided early": {},
    "divided late": {"loss": lambda model, micro: terms(model, micro)["fit"]},
    "several terms": {"loss": ab.Terms(terms, coefficients={"size": 0.25, "first": 2.0})},
    "whole batch": {"loss": ab.WholeBatch(spread)},
    "model's own": {"loss": ab.ModelLoss(), "model": Head},
    "float64 sums": {"accumulate": torch.float64},
    "collated": {"collate": collate},
    "clipped": {"clip_norm": 0.01},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
}


def build(
    kind: str = "dropout", *, dtype: torch.dtype = torch.float32, warm: int = 0, **options: Any
) -> ab.Step:
    """A step after `warm` updates; options `momentum`, `lr` and `model` are not its own."""
    torch.manual_seed(0)
    model = options.pop("model", Net)(kind).to(dtype)
    momentum, lr = options.pop("momentum", 0.9), options.pop("lr", 0.125)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    loss = options.pop("loss", nn.CrossEntropyLoss())

    def listen(event: object) -> None:
        model.fault.told.append(event)
        model.fault(type(event).__name__)

    defaults = {"micro_batch": SIZE, "check": False, "callbacks": [listening(listen)]}
    options = defaults | ZOO.get(kind, {}) | options
    if "collate" in options:
        inner = options["collate"]
        options["collate"] = lambda samples: (model.fault("collate"), inner(samples))[1]
    if "scheduler" in options:
        options["scheduler"] = options["scheduler"](optimizer)
    step = ab.Step(model, loss, optimizer, **flat(options))
    for index in range(warm):
        seed(index)
        step(of_form(step, make_batch(index, dtype=dtype)))
    model.fault.__init__()
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


def spoiled(step: ab.Step, where: str, bad: Sequence[int], **options: Any) -> tuple[Tensor, Tensor]:
    """A batch with bad rows for this step alone: their loss is not finite, or only their gradient."""
    x, y = make_batch(marked=bad, **options)
    step.model.fault.spoil = math.nan if where == "gradient" else 1.0
    if where == "loss":
        x[list(bad), 0] = math.nan
    return x, y


def of_form(step: ab.Step, batch: tuple[Tensor, Tensor]) -> Any:
    """The rows as this step takes them: a dict for a model with a loss of its own, samples to be collated."""
    if isinstance(step.model, Head):
        return {"x": batch[0], "labels": batch[1]}
    return list(zip(*batch, strict=True)) if step.collate else batch


def parts(batch: tuple[Tensor, Tensor], sizes: Sequence[int] | int = SIZE) -> list[tuple[Tensor, Tensor]]:
    sizes = sizes if isinstance(sizes, int) else list(sizes)
    return list(zip(*(one.split(sizes) for one in batch), strict=True))


def windowed(step: ab.Step, batch: tuple[Tensor, Tensor], cut: Sequence[int] | int = SIZE) -> ab.StepReport:
    with step.window() as window:
        for micro in parts(batch, cut):
            window.add(of_form(step, micro))
        return window.close()


def take(step: ab.Step, way: str, batch: tuple[Tensor, Tensor]) -> ab.StepReport:
    """One update from one random state."""
    seed(BEGIN)
    return windowed(step, batch) if way == "window" else step(of_form(step, batch))


def with_cut(step: ab.Step, cut: Sequence[int], batch: tuple[Tensor, Tensor]) -> ab.StepReport:
    """One update in this cut, without any choice."""
    seed(BEGIN)
    given = of_form(step, batch)
    task = step.task()
    plan = replace(step.plan(len(batch[0])), cut=tuple(cut), micro_batch=max(cut))
    admitted = admit(given, task, step.collate)
    with step.planning.enforced(task, admitted):
        task.effects.begin(task.network.modules)
        return carry_out(plan, task, admitted)


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
    step: ab.Step, report: ab.StepReport, twin: ab.Step, batch: Any, *, way: str = "step", bound: float = 0.0
) -> None:
    """All is as in the twin after the same cut without a fault; parameters and optimizers up to `bound`."""
    found = snapshot(step)
    seed(BEGIN)
    other = windowed(twin, batch, report.cut) if way == "window" else with_cut(twin, report.cut, batch)
    assert other.cut == report.cut
    expected = snapshot(twin)
    for one in (found, expected):
        del one["scale"]  # it counts updates without an overflow
    if bound:  # an `add` that came in halves is merged as one: its additions are in another order
        names = [name for name in expected if name.startswith(("parameter", "float32 copy", "optimizer"))]
        pairs = [(found.pop(name), expected.pop(name)) for name in names]
        compared = [(one, two) for one, two in pairs if isinstance(one, Tensor)]
        assert relative_error([one for one, _ in compared], [two for _, two in compared]) <= bound
    assert_same(expected, found)
    # A model's own loss is watched in the first attempt and read from the graph in the next: one rounding.
    assert relative_error(report.loss, other.loss) <= max(bound, tolerance(torch.float32, len(report.cut)))
    assert (report.weights, report.rows) == (other.weights, other.rows)
    assert (report.updated, report.dropped) == (True, 0)


def plant(step: ab.Step, largest: float, halvings: int) -> None:
    """Let marked rows overflow at the scale at which their gradient was this large, and so often."""
    step.model.fault.power = math.floor(math.log2(torch.finfo(torch.float16).max / largest)) + halvings


def weights(step: ab.Step) -> dict[str, Tensor]:
    """As the optimizer knows them, in the widest dtype they have."""
    pairs = [(name, one, step.masters.of(one)) for name, one in step.model.named_parameters()]
    return {name: (one if full is None else full).detach().double().clone() for name, one, full in pairs}


def moved(step: ab.Step, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - before[name] for name, value in weights(step).items()}


def said(error: BaseException | None) -> str:
    """What an error says, with its notes and those it was raised from."""
    if error is None:
        return ""
    notes = getattr(error, "__notes__", [])
    return "\n".join([str(error), *notes, said(error.__cause__)])


class Scarce(TorchDispatchMode):
    """Refuses allocations of watched functions: these, counted from 0, and all while more bytes are held."""

    def __init__(self, refuse: set[int], most: float) -> None:
        super().__init__()
        self.refuse, self.most, self.held = refuse, most, WeakTensorKeyDictionary()
        self.count = self.refused = self.watched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What writes in place or returns a view allocates nothing.
        is_made = not func._schema.is_mutable and all(one.alias_info is None for one in func._schema.returns)
        if not (self.watched and is_made):
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.count - 1 in self.refuse or sum(self.held.values()) > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if self.most < math.inf and isinstance(one, Tensor):
                self.held[one] = one.nbytes
        return made


@contextmanager
def scarce_in_passes(refuse: set[int] | None = None, *, most: float = math.inf) -> Generator[Scarce]:
    """Memory is scarce in forward and backward of micro-batches."""

    def watched(function: Any) -> Any:
        def run(*args: Any) -> Any:
            mode.watched += 1
            try:
                return function(*args)
            finally:
                mode.watched -= 1

        return run

    mode, passes = Scarce(refuse or set(), most), (Part.evaluate, Part.backward)
    with mock.patch.multiple(Part, **{one.__name__: watched(one) for one in passes}), mode:
        yield mode
