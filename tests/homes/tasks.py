"""Three tasks for the loops of other libraries, each as the host's own loss and as a loss of anybatch."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests import zoo

ROWS, MICRO_BATCH, MOST = 24, 7, 4  # in a model with `most`, more than MOST rows run out of memory
UPDATES = 20
HOSTS = {"accelerate": "tests.homes.accelerates", "lightning": "tests.homes.lightnings"}


class Run(NamedTuple):
    """A finished training by a host: of each update its gradient before clipping, loss and learning rate."""

    gradients: list[dict[str, Tensor]]
    losses: list[float]  # the last one is the mean
    rates: list[float]
    parameters: list[Tensor]
    report: ab.StepReport | None  # of the last update, where it was cut


def net(width: int = 16, most: int = ROWS) -> Any:
    torch.manual_seed(0)
    return zoo.Limited(most, zoo.Perceptron(6, 4, width=width))


def tokens(model: Callable[..., Tensor], batch: Any) -> Tensor:
    """The mean over the tokens that are not ignored: rows have unequal numbers of them."""
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def weighted(model: Callable[..., Tensor], batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * batch[2]).sum() / batch[2].sum()


def info_nce(left: Tensor, right: Tensor) -> Tensor:
    scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T * 5
    return F.cross_entropy(scores, torch.arange(len(left)))


def two_views(model: Callable[..., Tensor], micro: Any) -> tuple[Tensor, Tensor]:
    return model(micro[0]), model(micro[1])


LOSSES = {
    "tokens": tokens,
    "weighted": weighted,
    "contrastive": lambda model, batch: info_nce(*two_views(model, batch)),
}


def summed(model: nn.Module, micro: Any) -> ab.Total:
    losses = F.cross_entropy(model(micro[0]), micro[1], reduction="none")
    return ab.Total((losses * micro[2]).sum(), micro[2].sum())


OURS = {
    "tokens": ab.ModelLoss(call=tokens),
    "weighted": summed,
    "contrastive": ab.WholeBatch(info_nce, outputs=two_views),
}


def data(task: str, batches: int = UPDATES, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> Any:
    """The tensors of so many batches."""
    torch.manual_seed(1)
    count = batches * rows
    x = torch.randn(count, 6, dtype=dtype)
    if task == "tokens":
        kept = torch.arange(5) < torch.randint(1, 6, (count, 1))
        return torch.randn(count, 5, 6, dtype=dtype), torch.randint(4, (count, 5)).where(kept, -100)
    if task == "weighted":
        return x, torch.randint(4, (count,)), torch.rand(count, dtype=dtype) ** 4
    return x, x + torch.randn(count, 6, dtype=dtype) / 2


def dies_at(forward: int, module: nn.Module) -> None:
    """End this process by SIGKILL when the module is called for so many times more."""
    left = iter(range(forward))
    module.register_forward_pre_hook(
        lambda *_: None if next(left, None) is not None else os.kill(os.getpid(), signal.SIGKILL)
    )


def was_killed(train: Callable[[], object]) -> bool:
    """Run a training in a child process; return True if it died by SIGKILL."""
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    return child.exitcode == -signal.SIGKILL


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Set the variables that torchrun sets."""
    with pytest.MonkeyPatch.context() as patch:
        numbers = {"LOCAL_RANK": rank, "RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "MASTER_PORT": 0}
        for name, value in numbers.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")  # not used, as the port: there is a group
        yield


def on_rank(rank: int, size: int, host: str, task: str, is_cut: bool, *options: Any) -> Run:
    """Train by a host on every other batch."""
    with as_rank(rank, size):
        rows = [torch.cat(part.split(ROWS)[rank::size]) for part in data(task, batches=6)]
        return import_module(HOSTS[host]).train(task, is_cut=is_cut, rows=rows, ranks=size, **dict(options))
