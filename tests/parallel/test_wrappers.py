"""The strategy a step gets, the group that torchrun starts, and models that are wrapped."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from anybatch import Step
from anybatch.core.errors import PlanError
from tests.options import flat

BATCH = torch.randn(4, 3), torch.randn(4, 2)


def make(model: nn.Module | None = None, **options: Any) -> Step:
    model = nn.Linear(3, 2) if model is None else model
    return Step(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2, **flat(options)
    )


@contextmanager
def group(backend: str, store: Any, *, ranks: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_group_that_comes_after_the_step_is_refused() -> None:
    early = make()
    before = [p.detach().clone() for p in early.model.parameters()]
    with group("fake", FakeStore(), ranks=2):
        for refused in (lambda: early(BATCH), early.window):
            with pytest.raises(PlanError, match=r'group of 2 ranks.*strategy="local"'):
                refused()
        assert all(map(torch.equal, before, early.model.parameters()))
        assert make(strategy="local")(BATCH).updated
    assert early(BATCH).updated


def test_one_rank_is_as_none() -> None:
    with pytest.raises(PlanError, match="at least 2 ranks, got 1"):
        make(strategy="replicate")
    with pytest.raises(PlanError, match="'everywhere'"):
        make(strategy="everywhere")
    with group("fake", FakeStore(), ranks=1):
        assert make()(BATCH).updated


def test_wrapped_models() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group("gloo", dist.HashStore(), ranks=1):
        replica = DistributedDataParallel(nn.Linear(3, 2))
        assert make(replica).model is replica.module
        assert make(replica, strategy="local").model is replica
        sharded = nn.Sequential(nn.Linear(3, 2))
        fully_shard(sharded[0], mesh=init_device_mesh("cpu", (1,)))
        wrapped = {
            "DistributedDataParallel": nn.Sequential(DistributedDataParallel(nn.Linear(3, 2))),
            "DataParallel": nn.Sequential(DataParallel(nn.Linear(3, 2))),
        }
        with pytest.raises(PlanError, match="on the model itself"):
            make(sharded)
        for name, model in wrapped.items():
            with pytest.raises(PlanError, match=rf"wrapped in {name}.*model\.module"):
                make(model)
        late = make(nn.Sequential(nn.Linear(3, 2)))
        late.model[0] = DistributedDataParallel(late.model[0])
        with pytest.raises(PlanError, match="wrapped in Dist"):
            late(BATCH)


PROGRAM = """
import torch
from torch import nn

import anybatch as ab
from anybatch.parallel import rank

torch.manual_seed(0)
model = nn.Linear(3, 2).double()
step = ab.Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
report = step((x[:5], y[:5]) if rank() == 0 else (x[5:], y[5:]))
print(f"{report.rows} rows, loss {report.loss:.12f}")
"""


@pytest.mark.slow
def test_torchrun_starts_ranks(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    said = [
        subprocess.run(
            [*launch, count, str(program)], capture_output=True, text=True, timeout=120, check=True
        )
        for count in ("1", "2")
    ]
    # Two ranks share one output, so one's line may begin before the other's has ended.
    alone, both = (re.findall(r"(\d) rows, loss (\d+\.\d{12})", one.stdout) for one in said)
    assert [rows for rows, _ in alone] == ["5"]  # rank 0 brings five
    assert [rows for rows, _ in both] == ["7", "7"]
    assert both[0] == both[1]
