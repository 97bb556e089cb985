"""Tests of what a trace is fed with: batches of any size, and the micro-batches that tell of all."""

import pytest
import torch
from torch import nn

from anybatch import ModelLoss, WholeBatch
from anybatch.core.batch import Batch, SampleBatch, TensorBatch
from anybatch.engine.plan import Plan
from anybatch.losses.resolve import resolve
from anybatch.planner.trace import fake_batch, leaves_of, rows_kept, run_sizes
from benchmarks.zoo import ZOO

LOSS = resolve(torch.nn.MSELoss())


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (Plan(rows=9, micro_batch=9), (9,)),
        (Plan(rows=9, micro_batch=3), (3, 3, 3)),
        (Plan(rows=10, micro_batch=2), (2, 2, 2)),
        (Plan(rows=11, micro_batch=2), (2, 2, 1)),
        (Plan(rows=11, micro_batch=2, compensated=True), (2, 2, 2, 1)),
        (Plan(rows=11, micro_batch=5, cut=(5, 3, 2, 1)), (5, 3, 2, 1)),
    ],
)
def test_of_many_alike_a_few_are_run(plan: Plan, sizes: tuple[int, ...]) -> None:
    assert run_sizes(plan, LOSS, nn.Identity()) == sizes


def test_a_loss_over_all_rows_runs_them_all() -> None:
    assert run_sizes(Plan(rows=10, micro_batch=1), WholeBatch(torch.sum), nn.Identity()) == (1,) * 10


def test_views_of_one_tensor_stay_views_of_one() -> None:
    whole = torch.arange(20).reshape(2, 10)
    batch, leaves = fake_batch(TensorBatch((whole[:, :-1], whole[:, 1:])), 7, 7, LOSS)
    assert batch.rows == 7
    assert [leaf.shape for leaf in leaves] == [(7, 9), (7, 9)]
    assert leaves[0].untyped_storage()._cdata == leaves[1].untyped_storage()._cdata
    assert leaves[0].untyped_storage().nbytes() == 7 * 10 * 8
    assert leaves[1].storage_offset() == 1


def test_all_rows_are_there_where_only_the_first_are_run() -> None:
    batch, leaves = fake_batch(TensorBatch(torch.zeros(1, 3)), 100, 6, LOSS)
    assert (batch.rows, len(batch.whole), len(leaves[0])) == (6, 100, 100)
    assert [len(micro) for micro in batch.cut(2)] == [2, 2, 2]


def test_samples_are_collated_anew() -> None:
    batch, leaves = fake_batch(SampleBatch([torch.zeros(3)], torch.stack), 5, 5, LOSS)
    assert not leaves
    assert [micro.shape for micro in batch.cut(3)] == [(3, 3), (2, 3)]
    assert leaves_of(batch) == ()


def test_leaves_are_those_of_the_batch() -> None:
    given = torch.zeros(2), torch.ones(2)
    assert all(one is other for one, other in zip(leaves_of(TensorBatch(given)), given, strict=True))


@pytest.mark.parametrize(
    "batch", [TensorBatch((torch.ones(2), None)), SampleBatch([torch.ones(1)] * 2, list)]
)
def test_rows_are_kept(batch: Batch) -> None:
    with rows_kept(batch):
        batch.given[0].zero_()
    assert float(batch.given[0].sum()) == len(batch.given[0])


def test_a_router_s_scores_are_held_of_all_rows() -> None:
    model, loss = ZOO["mixtral"].build("small").model, resolve(ModelLoss())
    assert run_sizes(Plan(rows=10, micro_batch=1), loss, model) == (1,) * 10
    assert len(run_sizes(Plan(rows=10, micro_batch=1), loss, nn.Identity())) == 3
