"""Ranks that drift apart, wrappers that were told something, and groups. Called on every rank."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.parallel.fingerprint import TURNS

AT = 3  # the step before which rank 1 drifts


class Shifted(nn.Module):
    """A model with a buffer that forwards read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.zeros(4))
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, input: Tensor) -> Tensor:
        return self.body(input - self.mean)


def rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=drawn).double(), torch.randint(3, (5,), generator=drawn)


def load_weights(model: Any, optimizer: Any, loss: Any) -> None:
    model.load_state_dict({name: one + (name == "body.0.bias") for name, one in model.state_dict().items()})


def load_optimizer(model: Any, optimizer: Any, loss: Any) -> None:
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] / 2
    optimizer.load_state_dict(state)


def write_by_data(model: Any, optimizer: Any, loss: Any) -> None:
    model.body[2].weight.data[0, 0] += 1e-12


def write_state(model: Any, optimizer: Any, loss: Any) -> None:
    optimizer.state[model.body[2].weight]["exp_avg_sq"].mul_(1.1)


def set_rate(model: Any, optimizer: Any, loss: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def set_buffer(model: Any, optimizer: Any, loss: Any) -> None:
    model.mean += 1


def set_class_weights(model: Any, optimizer: Any, loss: Any) -> None:
    loss.weight[0] = 3


#: what a rank does, and after how many steps at most the others notice
DRIFTS: dict[str, tuple[Callable[..., None], int]] = {
    "weights": (load_weights, 0),
    "optimizer state": (load_optimizer, 0),
    "optimizer": (set_rate, 0),
    "loss": (set_class_weights, 0),
    "weights by data": (write_by_data, TURNS),
    "optimizer state in place": (write_state, TURNS),
    "buffers": (set_buffer, TURNS),
}


def noticed(rank: int, size: int, name: str, at: int = AT) -> tuple[int, str]:
    """After how many steps a drift is noticed, and by which error; -1 for never."""
    model, loss = Shifted(), nn.CrossEntropyLoss(weight=torch.ones(3).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = ab.Step(model, loss, optimizer, micro_batch=2, options=ab.Options(check=False))
    for index in range(at + TURNS + 1):
        if index == at and rank == 1 and name:
            DRIFTS[name][0](model, optimizer, loss)
        try:
            step(rows(rank, index))
        except ab.core.errors.PlanError as error:
            return index - at, str(error)
    return -1, ""


def same_rows(rank: int, size: int) -> str:
    model = Shifted()
    step = ab.Step(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        options=ab.Options(check=False),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(4):
            step(rows(0, index))
    return " ".join(str(one.message) for one in caught)


def in_a_half(rank: int, size: int) -> float:
    """The error of an update over half of the ranks."""
    halves = [dist.new_group([*range(start, start + size // 2)]) for start in (0, size // 2)]
    first = 0 if rank < size // 2 else size // 2
    model, same = Shifted(), Shifted()
    wrapped = DistributedDataParallel(model, process_group=halves[first > 0])
    step = ab.Step(wrapped, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=2)
    step(rows(rank, 0))
    parts = [rows(one, 0) for one in range(first, first + size // 2)]
    x, y = (torch.cat(alike) for alike in zip(*parts, strict=True))
    F.cross_entropy(same(x), y).backward()
    pairs = zip(model.parameters(), same.parameters(), strict=True)
    return max(float((one - (p.detach() - p.grad)).abs().max()) for one, p in pairs if p.grad is not None)
