"""Steps for which memory runs out, and what they must equal."""

import random
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import ModelLoss, Plan, Step, StepReport, Terms, Total, WholeBatch
from anybatch.engine import admit, carry_out
from anybatch.testing import relative_error, tolerance
from tests.snapshots import changes, snapshot

ROWS, FEATURES, CLASSES = 16, 6, 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """Repeated blocks, tied weights, a convolution, a buffer that every forward changes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 2, 3)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.leave = nn.Linear(8, CLASSES)
        self.tie = self.blocks[0].linear
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        hidden = self.enter(x[:, None]).flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(torch.tanh(self.tie(hidden)))


class Head(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(super().forward(x), labels)}


def total(model: nn.Module, micro: Any) -> Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
    return Total(losses.sum(), len(losses))


def terms(model: nn.Module, micro: Any) -> dict[str, Total]:
    size = model.leave.weight.square().sum()
    return {"fit": total(model, micro), "size": Total(size * len(micro[0]), len(micro[0]))}


def spread(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, target)


def collate(samples: list[Any]) -> Any:
    noise = random.random()
    return torch.stack([x for x, _ in samples]) + noise, torch.stack([y for _, y in samples])


OPTIONS: dict[str, dict[str, Any]] = {
    "early": {},
    "late": {"loss": total},
    "several terms": {"loss": Terms(terms, coefficients={"size": 0.1})},
    "whole batch": {"loss": WholeBatch(spread)},
    "model's own": {"loss": ModelLoss(), "model": Head},
    "float64 sums": {"accumulate": torch.float64},
    "compensated": {"loss": total, "compensated": True},
    "collated": {"collate": collate},
    "clipped": {"clip_norm": 0.01},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    enter, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [enter], "lr": 0.1}, {"params": rest}], lr=0.01)


def make(name: str, *, dropout: float = 0.0, micro_batch: int | None = 4, optimizer: Any = sgd) -> Step:
    options = dict(OPTIONS[name])
    torch.manual_seed(0)
    model = options.pop("model", Net)(dropout)
    loss = options.pop("loss", nn.CrossEntropyLoss())
    return Step(model, loss, optimizer(model), micro_batch=micro_batch, check=False, **options)


def batch_for(name: str, rows: int = ROWS) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (rows,), generator=generator)
    if name == "model's own":
        return {"x": x, "labels": y}
    return list(zip(x, y, strict=True)) if name == "collated" else (x, y)


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


def carried_out(step: Step, plan: Plan, batch: Any) -> StepReport:
    """The plan, without any fault."""
    seed()
    task = step.task()
    return carry_out(plan, task, admit(batch, task, step.collate))


def assert_same_as_the_same_cut(step: Step, report: StepReport, twin: Step, batch: Any) -> None:
    found = snapshot(step)
    plan = replace(twin.plan(len(step_rows(batch))), cut=report.cut)
    plan = replace(plan, micro_batch=max(plan.micro_batch, *report.cut))
    other = carried_out(twin, plan, batch)
    assert changes(snapshot(twin), found) == []
    # A model's own loss is watched in the first attempt and read from the graph in the next: one rounding.
    assert relative_error(report.loss, other.loss) <= tolerance(torch.float32, len(report.cut))
    one, two = (
        replace(each, loss=0, terms={}, redone=0, too_large=0, grad_norm=0) for each in (report, other)
    )
    assert one == two
    assert other.redone == 0
    assert sum(report.cut) == len(step_rows(batch))


def step_rows(batch: Any) -> Any:
    return batch["x"] if isinstance(batch, dict) else batch if isinstance(batch, list) else batch[0]
