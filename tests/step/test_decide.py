"""Cuts within a memory budget: the same result, within the budget; and told before there is a step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step
from anybatch.core import torch_private as private
from anybatch.core.errors import BatchError, PlanError
from anybatch.engine import Plan
from anybatch.step.decide import PATIENCE, Limits
from anybatch.testing import relative_error
from tests.budgets import (
    Meeting,
    Net,
    Untraceable,
    adamw,
    carried_out,
    foreach,
    make,
    measured,
    metered,
    refused,
    rows_of,
    sgd,
)
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot

LIMIT = 1e-12
CROSS_ENTROPY = nn.CrossEntropyLoss()
ROWS = 12


def net() -> nn.Module:
    return Net(blocks=2)


def vectors(dtype: torch.dtype = torch.float32, rows: int = ROWS, length: int = 5) -> Any:
    return rows_of(rows, length, 8, dtype=dtype)


def long(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Any:
    """Rows of 300 KB in `net`, or 600 KB in float64: tensors are most of the memory that is read."""
    return vectors(dtype, rows, 400)


def squares(rows: int = 8) -> Any:
    """Rows of half a megabyte in `Meeting`."""
    return rows_of(rows, 8, 64, 16)


def parameters(step: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "memory", "again"), [(sgd, 2_000_000, 0), (adamw, 875_000, 1), (foreach, 770_000, 2)]
)
def test_result_is_that_of_the_whole_batch_and_of_the_same_cut_to_the_bit(
    optimizer: Any, memory: int, again: int, made: list[Any]
) -> None:
    double = torch.float64
    batch = long(double, 6)
    whole, planned, obeyed = [make(net, optimizer, dtype=double, memory=one) for one in (None, memory, None)]
    for _ in range(3):
        expected, report = whole(batch), planned(batch)
        assert len(report.cut) > 1
        assert (f"{again} block" in planned.planning.explain()) is (again > 0)
        blocks = tuple((f"blocks.{number}", "recompute") for number in range(again))
        plan = Plan(rows=6, micro_batch=max(report.cut), cut=report.cut, blocks=blocks)
        carried_out(obeyed, plan, batch)
        assert relative_error(report.loss, expected.loss) <= LIMIT
    assert not made
    assert relative_error(parameters(planned), parameters(whole)) <= LIMIT
    assert_same(snapshot(obeyed), snapshot(planned))


@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"micro_batch": 2}, {"clip_norm": 0.1}])
def test_the_real_step_takes_what_was_foreseen(options: dict[str, Any]) -> None:
    step, batch, memory = make(net, memory=1_500_000, **options), long(rows=6), 1_500_000
    for _ in range(10):
        step(batch)
    report = step.foresee(batch)
    found = metered(step, lambda: step(batch), batch)
    assert abs(report.peak - found) <= 0.01 * memory
    assert 0.5 * memory < found <= memory
    assert report.plan.micro_batch == options.get("micro_batch", report.plan.micro_batch)
    assert "recompute" not in options or report.plan.blocks == step.planning.settings.blocks


def test_batch_norm_is_never_cut(made: list[Any]) -> None:
    batch = squares()
    most = measured(make(Meeting), batch)
    assert make(Meeting, memory=int(1.3 * most))(batch).cut == (8,)
    for memory in (int(0.8 * most), refused(make(Meeting, memory=most // 3), batch, "4 BatchNorm layers")):
        step = make(Meeting, memory=memory)
        assert {step(batch).cut for _ in range(2)} == {(8,)}
        assert metered(step, lambda step=step: step(batch), batch) <= memory
        assert "recomputed, as no row fits without" in step.planning.explain()
    with pytest.raises(PlanError, match=r"frozen.*batch_norm_to_group_norm"):
        make(Meeting, memory=2 * most, micro_batch=2)(batch)
    assert not made


def test_batch_norm_is_cut_before_blocks_run_again_where_that_is_allowed(made: list[Any]) -> None:
    batch = squares()
    most = measured(make(Meeting), batch)
    for memory, cut in ((int(1.3 * most), (8,)), (int(0.8 * most), (4, 4))):
        step = make(Meeting, memory=memory, batch_norm="micro")
        assert {step(batch).cut for _ in range(3)} == {cut}
    step.micro_batch = 2  # pyright: ignore
    assert step(batch).cut == (2,) * 4  # pyright: ignore
    assert not made


def test_a_cut_that_is_felt_depends_on_its_rows_alone(made: list[Any]) -> None:
    """Not on what came before: the statistics of micro-batches do."""

    def step() -> Step:
        return make(Meeting, memory=3_250_000, batch_norm="micro")

    alone = {rows: step()(squares(rows)).cut for rows in (8, 13)}
    assert all(len(cut) > 1 for cut in alone.values())
    after = step()
    for rows in (13, 8, 13, 8, 8):
        assert after(squares(rows)).cut == alone[rows]
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


def test_a_size_that_was_asked_for_is_kept_or_refused() -> None:
    batch = long()
    step = make(net, memory=3_000_000, micro_batch=5)
    assert {step(batch).cut for _ in range(3)} == {(5, 5, 2)}
    least = refused(make(net, memory=1_000_000, micro_batch=5), batch, "room for 5 rows at a time")
    step = make(net, memory=least, micro_batch=5)
    assert {step(batch).cut for _ in range(3)} == {(5, 5, 2)}


def test_few_rows_foresee_a_step_on_many() -> None:
    asked, whole = make(net, memory=3_000_000, micro_batch=5), make(Meeting, memory=10**8)
    asked(long())
    for few in (1, 4):
        assert asked.foresee(long(rows=few), rows=ROWS).plan.sizes == (5, 5, 2)
    whole(squares())
    assert whole.foresee(squares(), rows=16).plan.sizes == (16,)


def test_a_step_plans_nothing_and_foresee_asks_once(made: list[Any]) -> None:
    step = make(net, memory=2_000_000)
    with pytest.raises(PlanError, match=r"memory=2000000, got 12 rows\. Call step\.foresee"):
        step.plan(ROWS)
    step(long())
    step(long(rows=7))
    assert not made
    assert step.foresee(long(), memory=10**7).plan.rows == ROWS
    assert len(made) == 1


def test_windows_come_as_they_are_unless_they_do_not_fit() -> None:
    batch = long(rows=16)

    def window(memory: int, **options: Any) -> tuple[int, ...]:
        with make(net, memory=memory, **options).window() as opened:
            opened.add(tuple(leaf[:14] for leaf in batch))
            opened.add(tuple(leaf[14:] for leaf in batch))
            return opened.close().cut

    cut = window(2_000_000)
    assert (max(cut[:-1]) < 14, cut[-1]) == (True, 2)
    assert window(10**8, micro_batch=4) == (14, 2)  # a size for batches, not for windows


# ---- what memory has taught


def test_more_is_tried_after_clean_steps_and_each_failure_doubles_the_patience() -> None:
    limits = Limits()
    limits.learn("rows", 32, largest=32, failed=0)
    assert not limits.known
    limits.learn("rows", 32, largest=32, failed=32)
    assert limits.size("other rows", 32) == 32
    assert limits.size("rows", 4) == 4
    for _ in range(PATIENCE):
        assert limits.size("rows", 32) == 16
        limits.learn("rows", 32, largest=16, failed=0)
    assert limits.size("rows", 32) == 24
    limits.learn("rows", 32, largest=24, failed=24)
    for _ in range(2 * PATIENCE):
        assert limits.size("rows", 32) == 16  # not the half of 24
        limits.learn("rows", 32, largest=16, failed=0)
    limits.learn("rows", 32, largest=24, failed=0)
    assert (limits.size("rows", 32), limits.known["rows"].clean) == (24, 0)  # kept, as it fits
    limits.learn("rows", 32, largest=16, failed=16)  # what used to fit does no longer
    assert limits.size("rows", 32) == 8


# ---- told before there is a step


def test_without_a_budget_nothing_is_chosen() -> None:
    step, batch = make(net), vectors()
    asked: Any = (step.model, CROSS_ENTROPY, step.optimizers, batch)
    report = ab.plan(*asked)
    assert (report.plan, report.budget) == (Plan(rows=12, micro_batch=12), None)
    told = ab.plan(*asked, micro_batch=5, options=ab.Options(recompute=["blocks.1"]))
    assert told.plan == Plan(rows=12, micro_batch=5, blocks=(("blocks.1", "recompute"),))
    carried_out(step, told.plan, batch)
    assert metered(step, lambda: carried_out(step, told.plan, batch), batch) == told.peak


@pytest.mark.parametrize("rows", [0, 1.5, "7", True])
def test_no_number_of_rows_is_refused_by_its_name(rows: Any) -> None:
    step, batch = make(net), vectors()
    with pytest.raises(PlanError, match=rf"^Expected rows to be a whole .*, got {rows!r}\. Leave it out"):
        ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch, rows=rows)
    counted = ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch, rows=np.int64(7))
    assert counted.plan.to_json() == Plan(rows=7, micro_batch=7).to_json()


def test_a_model_without_memory_and_a_batch_of_two_rows_do() -> None:
    with torch.device("meta"):
        model = Net(blocks=2)
        few = torch.zeros(2, 5, 8), torch.zeros(2, dtype=torch.long)
    asked: Any = model, CROSS_ENTROPY, adamw(model.parameters())
    with pytest.raises(BatchError, match=r"device meta, got cpu\. To plan, name the device"):
        ab.plan(*asked, vectors())
    assert ab.plan(*asked, vectors(), device="cpu").plan == Plan(rows=12, micro_batch=12)
    report = ab.plan(*asked, few, rows=40, memory=100_000)
    assert report.plan.rows == 40
    step, batch = make(net), rows_of(40, 5, 8)
    carried_out(step, report.plan, batch)
    assert metered(step, lambda: carried_out(step, report.plan, batch), batch) == report.peak <= 100_000
    card = ab.plan(*asked, few, rows=4096, memory="8MB", device="cuda:a100")  # that is not here
    assert (card.device, card.ledger.device, card.peak % 512) == ("cuda:a100", "cuda", 0)
    assert card.peak <= 8 * 10**6


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true", "bf16-mixed"])
def test_nothing_is_changed_whatever_is_planned_for(precision: Any) -> None:
    step, batch = make(lambda: Net(0.1, 2)), vectors()
    step(batch)
    step.model.blocks[0].eval()
    model, optimizer = step.model, step.optimizers[0]

    def held() -> list[Any]:
        hooks = [len(vars(optimizer)[name]) for name in private.LOAD_HOOKS]
        return [*[(p.data_ptr(), p.dtype) for p in model.parameters()], *map(id, model.modules()), *hooks]

    wanted: Any = {"memory": 60_000, "precision": precision}
    before = held()
    with same_as_before(step):
        report = ab.plan(model, CROSS_ENTROPY, optimizer, batch, **flat(wanted))
    assert held() == before
    assert str(report.plan.precision) == precision


def test_what_cannot_be_traced_is_refused() -> None:
    step, batch = make(Untraceable), rows_of(8)
    arguments = (step.model, CROSS_ENTROPY, step.optimizers, batch)
    for device in (None, "cuda:a100"):
        with pytest.raises(PlanError, match=r"nonzero.* Choose micro_batch= yourself"):
            ab.plan(*arguments, memory=10**6, device=device)
