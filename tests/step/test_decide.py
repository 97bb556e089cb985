"""Cuts within a memory budget: the same result, within the budget; and told before there is a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.core.errors import PlanError
from anybatch.engine import Plan
from anybatch.testing import relative_error
from tests import budgets
from tests.budgets import Meeting, Net, adamw, foreach, make, metered, refused, rows_of, sgd
from tests.snapshots import assert_same, snapshot

LIMIT = 1e-12


def net() -> nn.Module:
    return Net(blocks=2)


def long(dtype: torch.dtype = torch.float32) -> Any:
    """Rows of 300 KB in `net`, or 600 KB in float64: tensors are most of the memory that is read."""
    return rows_of(6, 400, 8, dtype=dtype)


def parameters(step: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "memory", "again"), [(sgd, 2_000_000, 0), (adamw, 875_000, 1), (foreach, 770_000, 2)]
)
def test_result_is_that_of_the_whole_batch_and_of_the_same_cut_to_the_bit(
    optimizer: Any, memory: int, again: int, made: list[Any]
) -> None:
    double = torch.float64
    batch = long(double)
    whole, planned, obeyed = [make(net, optimizer, dtype=double, memory=one) for one in (None, memory, None)]
    for _ in range(3):
        expected, report = whole(batch), planned(batch)
        assert len(report.cut) > 1
        assert (f"{again} block" in planned.planning.explain()) is (again > 0)
        blocks = tuple((f"blocks.{number}", "recompute") for number in range(again))
        plan = Plan(rows=6, micro_batch=max(report.cut), cut=report.cut, blocks=blocks)
        budgets.carried_out(obeyed, plan, batch)
        assert relative_error(report.loss, expected.loss) <= LIMIT
    assert not made
    assert relative_error(parameters(planned), parameters(whole)) <= LIMIT
    assert_same(snapshot(obeyed), snapshot(planned))


@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"micro_batch": 2}, {"clip_norm": 0.1}])
def test_the_real_step_takes_what_was_foreseen(options: dict[str, Any]) -> None:
    step, batch, memory = make(net, memory=1_500_000, **options), long(), 1_500_000
    for _ in range(10):
        step(batch)
    report = step.foresee(batch)
    found = metered(step, lambda: step(batch), batch)
    assert abs(report.peak - found) <= 0.01 * memory
    assert 0.5 * memory < found <= memory
    assert report.plan.micro_batch == options.get("micro_batch", report.plan.micro_batch)
    assert "recompute" not in options or report.plan.blocks == step.planning.settings.blocks


def test_batch_norm_is_never_cut(made: list[Any]) -> None:
    batch = rows_of(8, 8, 64, 16)  # half a megabyte each
    most = budgets.measured(make(Meeting), batch)
    assert make(Meeting, memory=int(1.3 * most))(batch).cut == (8,)
    for memory in (int(0.8 * most), refused(make(Meeting, memory=most // 3), batch, "4 BatchNorm layers")):
        step = make(Meeting, memory=memory)
        assert {step(batch).cut for _ in range(2)} == {(8,)}
        assert metered(step, lambda step=step: step(batch), batch) <= memory
        assert "recomputed, as no row fits without" in step.planning.explain()
    with pytest.raises(PlanError, match=r"frozen.*batch_norm_to_group_norm"):
        make(Meeting, memory=2 * most, micro_batch=2)(batch)
    assert not made


def test_single_rows_that_batch_norm_refuses_are_nobodys_plan() -> None:
    def net() -> nn.Module:
        norm = nn.BatchNorm1d(8192)
        return nn.Sequential(nn.Linear(8, 8192), norm, nn.Sigmoid(), nn.Tanh(), nn.Linear(8192, 4))

    assert make(net, sgd, memory=1_600_000, batch_norm="micro")(rows_of(3)).cut == (3,)
    for rows in (4, 31):
        least = refused(make(net, sgd, memory=1_600_000, batch_norm="micro"), rows_of(rows))
        step = make(net, sgd, memory=least, batch_norm="micro")
        assert min(step(rows_of(rows)).cut) > 1
