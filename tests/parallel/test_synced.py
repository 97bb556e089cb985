"""SyncBatchNorm over ranks: one micro-batch per rank is exact; what would split rows further is refused."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

import anybatch as ab
from anybatch.parallel import Replicate
from tests.faults import faulty
from tests.faults.faulty import NO_MEMORY
from tests.parallel.pairs import Pair, share, told, whole
from tests.parallel.spawned import on_ranks


class Synced(nn.SyncBatchNorm):
    """A SyncBatchNorm for gloo: torch's own runs on accelerators only."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        group = self.process_group or dist.group.WORLD
        count = all_reduce(input.new_tensor(float(len(input))), group=group)
        mean = all_reduce(input.sum(0), group=group) / count
        var = all_reduce((input - mean).square().sum(0), group=group) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
            self.running_var.lerp_(var * count / (count - 1), 0.1)  # type: ignore[union-attr]
        return (input - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def build(norm: Callable[[int], nn.Module] = Synced) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 3), norm(3)).double()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, 0, -100, 2, 0, 1])
LOSSES: dict[str, Callable[[], Any]] = {
    "mean": nn.CrossEntropyLoss,
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "whole batch": lambda: ab.WholeBatch(faulty.spread),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(5, 3), (7, 1), (2, 6)])
@on_ranks(2)
def test_one_micro_batch_per_rank_is_the_whole_batch(rank: int, size: int, sizes: Any, loss: str) -> object:
    pair = Pair(build(nn.BatchNorm1d), LOSSES[loss], "momentum", parts=build(), both={"clip_norm": 0.5})
    batch = X, torch.arange(8) if loss == "whole batch" else Y
    assert "SyncBatchNorm" in [pair.update(batch, sizes, rank) for _ in range(3)][-1].unchecked
    return pair.bits


def with_groups() -> nn.Module:
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())]
    return build(lambda width: Synced(width, process_group=alone[dist.get_rank()]))


# By what is said: a model, the options of its step, and rows of the ranks.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Sequence[int]]] = {
    "got [2, 1] on ranks 0 to 1: the batch is split over ranks": (build, {"micro_batch": 3}, (5, 3)),
    "got [1, 0] on ranks": (build, {}, (8, 0)),
    "got memory, which may run": (build, {"memory": "1GB"}, (5, 3)),
    "got non_finite='drop', which may run": (build, {"non_finite": "drop"}, (5, 3)),
    "another process group in 1, 4": (with_groups, {}, (5, 3)),
}


@pytest.mark.parametrize("said", REFUSED)
@on_ranks(2)
def test_what_would_split_rows_further_is_refused(rank: int, size: int, said: str) -> None:
    make, options, sizes = REFUSED[said]
    pair = Pair(model := make(), "torch", "sgd", parts=model, **options)
    found = told(lambda: pair.step(share((X, Y), sizes, rank)))
    assert said in found, found
    assert Pair(build(), "torch", "sgd").step(share((X, Y), (5, 3), rank)).updated


@on_ranks(2)
def test_a_rank_that_fails_in_the_layer_leaves_all_as_it_was_and_ends_the_run(rank: int, size: int) -> None:
    """Rank 1 fails in its forward, in which the other waits for it; then both try again."""
    group = dist.new_group(timeout=timedelta(seconds=6))  # a busy machine answers later than 2

    model = build(lambda width: Synced(width, process_group=group))
    forward = mock.Mock(side_effect=NO_MEMORY) if rank else Synced.forward
    pair = Pair(model, "torch", "sgd", parts=model, strategy=Replicate(group=group))
    before = [one.clone() for one in whole(model)]
    with mock.patch.object(Synced, "forward", forward):
        said = [told(lambda: pair.step(share((X, Y), (5, 3), rank))) for _ in range(2)]
    assert all(map(torch.equal, before, whole(model)))
    assert not rank or "it was not run again" in said[0]
    assert "Expected all ranks at the same step" in said[1]
