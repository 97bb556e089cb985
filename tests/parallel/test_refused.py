"""What several ranks refuse, each with its reason and on all ranks, after which a step goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook as hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel as Wrapped

import anybatch as ab
from anybatch.parallel import Shard
from tests.options import flat
from tests.parallel.pairs import make, rows, shard, share, tokens, told
from tests.parallel.spawned import on_ranks

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def stepped(model: nn.Module, loss: Any = None, lr: float = 0.1, **options: Any) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return ab.Step(model, loss or nn.CrossEntropyLoss(), optimizer, **flat(options))


def network(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))


DIFFERENT: dict[str, Callable[[], ab.Step]] = {
    "model": lambda: stepped(network(width=5)),
    "weights": lambda: stepped(network(seed=1)),
    "optimizer": lambda: stepped(network(), lr=0.2),
    "loss": lambda: stepped(network(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "options": lambda: stepped(network(), clip_norm=1.0),
}


@pytest.mark.parametrize("part", DIFFERENT)
@on_ranks(2)
def test_ranks_that_differ_are_told_in_what(rank: int, size: int, part: str) -> None:
    said = told(lambda: (DIFFERENT[part]() if rank else stepped(network()))((X, Y)))
    assert said.startswith(f"PlanError: Expected the same {part} on all 2 ranks, got another on ranks [1]")


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {  # by what is said
    "fp16_compress_hook": (lambda: (it := Wrapped(linear()), it.register_comm_hook(None, hook))[0], {}),
    "weight": (lambda: (model := linear(), model.weight.sum().backward())[0], {}),
    "DataParallel": (lambda: DataParallel(linear()), {}),
    "BatchNorm": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)), {}),
    "SyncBatchNorm": (lambda: nn.Sequential(linear(), nn.SyncBatchNorm(3)), {"batch_norm": "micro"}),
    "lazy": (lambda: nn.LazyLinear(3), {}),
}


@pytest.mark.parametrize("said", REFUSED)
@on_ranks(2)
def test_models_that_replicas_refuse(rank: int, size: int, said: str) -> None:
    model, options = REFUSED[said]
    assert said in told(lambda: stepped(model(), **options)((X, Y)))
    assert stepped(linear())((X, Y)).updated


@on_ranks(2)
def test_sparse_gradients_are_refused_and_nothing_is_no_update(rank: int, size: int) -> None:
    sparse = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(3, 3))
    assert "sparse" in told(lambda: stepped(sparse)((Y[:, None], Y)))
    assert "no update" in repr(stepped(network())(None))
    assert "Leave the add out" in told(lambda: stepped(network()).window().add((X[:0], Y[:0])))


@on_ranks(2)
def test_one_rank_may_check_a_wrapped_model_alone(rank: int, size: int) -> None:
    model = Wrapped(linear())
    step = stepped(model)
    if not rank:  # the others do not take part
        assert ab.check(model, nn.CrossEntropyLoss(), (X, Y)).exact
        ab.gradient_flow(model, nn.CrossEntropyLoss(), (X, Y))
        ab.plan(model, nn.CrossEntropyLoss(), step.optimizers[0], (X, Y), memory="64MB")
    assert step((X, Y)).updated


def sharded() -> Any:
    return shard(make())


Watcher = type("Watcher", (ab.Callback,), {"gradients": lambda *_: None})
OF_SHARDS: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {  # what is said, a model, options
    "local": ('strategy="auto"', sharded, {"strategy": "local"}),
    "replicate": ('strategy="auto"', sharded, {"strategy": "replicate"}),
    "Shard": ("without it", make, {"strategy": Shard()}),
    "parts": ("on the model itself", lambda: (model := make(), fully_shard(model.inner[0]))[0], {}),
    "fp16-mixed": ("fp16-mixed", sharded, {"precision": "fp16-mixed"}),
    "bf16-true": ("bf16-true", sharded, {"precision": "bf16-true"}),
    "drop": ("drop", sharded, {"non_finite": "drop"}),
    "memory": ("Leave out one of both", sharded, {"memory": "1GB", "strategy": Shard(hold=True)}),
    "callbacks": ("callbacks", sharded, {"callbacks": [Watcher()]}),
    "hold": ("the same hold", sharded, {"strategy": Shard(hold=True)}),
    "terms": ("one term", sharded, {"loss": lambda *of: {"one": tokens(*of), "two": tokens(*of)}}),
}


@pytest.mark.parametrize("name", OF_SHARDS)
@on_ranks(2)
def test_what_shards_refuse(rank: int, size: int, name: str) -> None:
    said, model, options = OF_SHARDS[name]
    if name in ("callbacks", "hold") and not rank:
        options = {"strategy": Shard(hold=False)} if name == "hold" else {}
    options, batch = {"loss": tokens, "micro_batch": 2} | options, share(rows(8), [4, 4], rank)
    assert said in told(lambda: stepped(model(), **options)(batch))


@on_ranks(2)
def test_checks_and_plans_come_before_shards(rank: int, size: int) -> None:
    parts, batch = shard(make()), share(rows(8), [4, 4], rank)
    optimizer = torch.optim.SGD(parts.parameters())
    plan = partial(ab.plan, parts, tokens, optimizer, memory="1GB")
    for call in (partial(ab.check, parts, tokens), plan, partial(ab.gradient_flow, parts, tokens)):
        assert "before fully_shard" in told(lambda: call(batch))  # noqa: B023
