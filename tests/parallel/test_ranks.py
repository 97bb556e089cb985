"""More than one rank: refused at the door and at the first call, unless the caller synchronises."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from anybatch import Step
from anybatch.core.errors import PlanError

BATCH = torch.randn(4, 3), torch.randn(4, 2)


def make(model: nn.Module | None = None, **options: Any) -> Step:
    model = nn.Linear(3, 2) if model is None else model
    return Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2, **options)


@contextmanager
def group(backend: str, store: Any, *, ranks: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_several_ranks_are_refused_at_the_door_and_at_the_first_call() -> None:
    early = make()
    before = [p.detach().clone() for p in early.model.parameters()]
    with group("fake", FakeStore(), ranks=2):
        for refused in (make, lambda: early(BATCH), early.window):
            with pytest.raises(PlanError, match=r'group of 2.*strategy="local"'):
                refused()
        assert all(map(torch.equal, before, early.model.parameters()))
        assert make(strategy="local")(BATCH).updated
    assert early(BATCH).updated


def test_one_rank_is_as_none() -> None:
    with group("fake", FakeStore(), ranks=1):
        assert make()(BATCH).updated


@pytest.mark.parametrize("strategy", ["single", "local"])
def test_wrapped_models_are_refused(strategy: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group("gloo", dist.HashStore(), ranks=1):
        sharded = nn.Sequential(nn.Linear(3, 2))
        fully_shard(sharded[0], mesh=init_device_mesh("cpu", (1,)))
        wrapped = {
            "DistributedDataParallel": DistributedDataParallel(nn.Linear(3, 2)),
            "DataParallel": nn.Sequential(DataParallel(nn.Linear(3, 2))),
            "FSDPModule": sharded,
        }
        for name, model in wrapped.items():
            with pytest.raises(PlanError, match=rf"wrapped in {name}.*model\.module"):
                make(model, strategy=strategy)
        late = make(nn.Sequential(nn.Linear(3, 2)))
        late.model[0] = DistributedDataParallel(late.model[0])
        with pytest.raises(PlanError, match="wrapped in Dist"):
            late(BATCH)


def drift(rank: int, store: str, told: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        with pytest.raises(PlanError, match="process group of 2"):
            make()
        torch.manual_seed(0)
        step = make(strategy="local")
        step(tuple(one + rank for one in BATCH))
        for parameter in step.model.parameters():  # the caller's own synchronisation
            dist.all_reduce(parameter.data)
        told.put((rank, step.model.weight.tolist()))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_synchronise_by_themselves(tmp_path: Path) -> None:
    told = mp.get_context("spawn").SimpleQueue()
    mp.spawn(drift, (str(tmp_path / "store"), told), nprocs=2)
    found = dict(told.get() for _ in range(2))
    assert found[0] == found[1]
