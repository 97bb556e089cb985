"""Steps of ranks whose rows meet in a SyncBatchNorm, held against one process. Called on every rank."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

import anybatch as ab
from anybatch.parallel import Replicate
from tests.faults import faulty
from tests.options import flat
from tests.parallel.cases import share
from tests.parallel.refused import told

GIVE_UP = timedelta(seconds=6)  # a busy machine answers later than 2


class Synced(nn.SyncBatchNorm):
    """A SyncBatchNorm for gloo: torch's own runs on accelerators only."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                0.1,
                self.eps,
            )
        group = self.process_group or dist.group.WORLD
        count = all_reduce(input.new_tensor(float(len(input))), group=group)
        mean = all_reduce(input.sum(0), group=group) / count
        var = all_reduce((input - mean).square().sum(0), group=group) / count
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * count / (count - 1), 0.1)
        return (input - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def build(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 3), norm(3)).double()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, 0, -100, 2, 0, 1])
LOSSES: dict[str, Callable[[], Any]] = {
    "mean": nn.CrossEntropyLoss,
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "whole batch": lambda: ab.WholeBatch(faulty.spread),
}


def train(rank: int, size: int, sizes: Sequence[int], loss: str, options: dict[str, Any]) -> dict[str, Any]:
    """Three updates; parameters, buffers and what was reported. One rank takes plain BatchNorm."""
    model = build(Synced if size > 1 else nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    targets = torch.arange(8) if loss == "whole batch" else Y
    step = ab.Step(model, LOSSES[loss](), optimizer, **flat(options))
    reports = [step(share((X, targets), sizes, rank)) for _ in range(3)]
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": [b for b in model.buffers() if b.is_floating_point()],
        "reports": [(r.loss, r.grad_norm) for r in reports],
        "unchecked": reports[-1].unchecked,
    }


def refused(rank: int, size: int) -> dict[str, str]:
    """What each rank is told."""

    def step_of(model: nn.Module, rows: Sequence[int] = (5, 3), loss: Any = None, **options: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ab.Step(model, loss or nn.CrossEntropyLoss(), optimizer, **flat(options))
        return lambda: step(share((X, Y), rows, rank))

    def windowed(norm: Callable[[int], nn.Module]) -> None:
        model = build(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Step(model, nn.CrossEntropyLoss(), optimizer).window() as window:
            window.add(share((X, Y), (5, 3), rank))

    alone = [dist.new_group([one]) for one in range(size)]
    other = build(lambda width: Synced(width, process_group=alone[rank]))
    half = build(Synced).train(rank == 0)
    mixed = nn.Sequential(build(Synced), nn.BatchNorm1d(3).double())
    return {
        "cut": told(step_of(build(Synced), micro_batch=3)),
        "empty": told(step_of(build(Synced), (8, 0))),
        "memory": told(step_of(build(Synced), memory="1GB")),
        "recompute": told(step_of(build(Synced), recompute=["0"])),
        "precision": told(step_of(build(Synced).float(), precision="fp16-mixed")),
        "non_finite": told(step_of(build(Synced), non_finite="drop")),
        "group": told(step_of(other)),
        "mode": told(step_of(half)),
        "plain": told(step_of(mixed)),
        "window": told(lambda: windowed(Synced)),
        "plain window": told(lambda: windowed(nn.BatchNorm1d)),
        "after": told(step_of(build(Synced))),
    }


def interrupted(rank: int, size: int, error: BaseException) -> list[str]:
    """Rank 1 fails in its forward, in which the other waits for it; then both try again."""
    group = dist.new_group(timeout=GIVE_UP)

    class Fails(Synced):
        def forward(self, input: Tensor) -> Tensor:
            if rank == 1:
                raise error
            return super().forward(input)

    model = build(lambda width: Fails(width, process_group=group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(
        model, nn.CrossEntropyLoss(), optimizer, options=ab.Options(strategy=Replicate(group=group))
    )
    before = [p.detach().clone() for p in [*model.parameters(), *model.buffers()]]
    said: list[str] = []
    for _ in range(2):
        try:
            step(share((X, Y), (5, 3), rank))
        except BaseException as found:
            said.append(f"{type(found).__name__}: {found}")
    assert all(map(torch.equal, before, [*model.parameters(), *model.buffers()]))
    return said
