"""The strategy a step gets, and models that are wrapped."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(model, nn.MSELoss(), optimizer, micro_batch=2, **flat(options))


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
    with group("gloo", dist.HashStore(), ranks=1):
        replica = DistributedDataParallel(nn.Linear(3, 2))
        assert make(replica).model is replica.module
        assert make(replica, strategy="local").model is replica
        for kind in (DistributedDataParallel, DataParallel):
            with pytest.raises(PlanError, match=rf"wrapped in {kind.__name__}.*model\.module"):
                make(nn.Sequential(kind(nn.Linear(3, 2))))
