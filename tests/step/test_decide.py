"""Plans for a memory budget: the same result, within the budget; and told before there is a step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch import Step
from anybatch.core import torch_private as private
from anybatch.core.errors import BatchError, BudgetError, PlanError
from anybatch.engine import Plan
from anybatch.step.decide import PATIENCE, Limits
from anybatch.testing import relative_error
from tests.budgets import (
    ConvNet,
    Net,
    Untraceable,
    adamw,
    carried_out,
    foreach,
    images,
    make,
    measured,
    metered,
    rows_of,
    sgd,
)
from tests.options import flat
from tests.snapshots import assert_same, same_as_before, snapshot

LIMIT = 1e-12
CROSS_ENTROPY = nn.CrossEntropyLoss()
ROWS = 12
MEMORY = 48_000  # of the 75 kB that the whole batch takes


def net() -> nn.Module:
    return Net(blocks=2)


def vectors(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Any:
    return rows_of(rows, 5, 8, dtype=dtype)


def parameters(step: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize("optimizer", [sgd, adamw, foreach])
def test_result_is_that_of_the_whole_batch_and_of_the_same_cut_to_the_bit(optimizer: Any) -> None:
    double = torch.float64
    batch = vectors(double)
    whole, planned, obeyed = [
        make(net, optimizer, dtype=double, memory=memory) for memory in (None, 2 * MEMORY, None)
    ]
    cuts: list[int] = []
    for _ in range(3):
        expected, report = whole(batch), planned(batch)
        cuts += report.cut
        carried_out(obeyed, Plan(rows=ROWS, micro_batch=max(report.cut), cut=report.cut), batch)
        assert relative_error(report.loss, expected.loss) <= LIMIT
    assert len(cuts) > 3
    assert relative_error(parameters(planned), parameters(whole)) <= LIMIT
    assert_same(snapshot(obeyed), snapshot(planned))


@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"micro_batch": 5}, {"clip_norm": 0.1}])
def test_the_real_second_step_takes_what_was_predicted(options: dict[str, Any]) -> None:
    step, batch = make(net, memory=MEMORY, **options), vectors()
    for _ in range(3):
        step(batch)
    report = step.foresee(batch)
    assert metered(step, lambda: step(batch), batch) == report.peak <= MEMORY
    assert report.plan.micro_batch == options.get("micro_batch", report.plan.micro_batch)
    assert "recompute" not in options or report.plan.blocks == step.planning.settings.blocks


def test_a_budget_that_is_too_small_changes_nothing_and_the_smallest_is_enough() -> None:
    step, batch = make(net, memory=1000), vectors()
    with same_as_before(step), pytest.raises(BudgetError) as refused:
        step(batch)
    least = refused.value.smallest
    with pytest.raises(BudgetError):
        make(net, memory=least - 1)(batch)
    step = make(net, memory=least)
    step(batch)
    assert measured(step, batch) == least


def test_batch_norm_is_never_cut() -> None:
    batch = images(8)
    step = make(ConvNet)
    with pytest.raises(BudgetError, match="BatchNorm") as refused:
        step.foresee(batch, memory=1000)
    least, most = refused.value.smallest, step.foresee(batch).peak
    whole = make(ConvNet, memory=(least + most) // 2)
    plan = whole.foresee(batch).plan
    assert not plan.is_cut
    assert plan.blocks
    assert whole(batch).micro_batches == 1
    with pytest.raises(PlanError, match=r"frozen.*batch_norm_to_group_norm"):
        make(ConvNet, memory=most, micro_batch=2)(batch)
    # Allowed, a cut is only the last way out.
    for memory, cut in (((least + most) // 2, False), (least - 1, True)):
        allowed = make(ConvNet, memory=memory, batch_norm="micro")
        assert allowed.foresee(batch).plan.is_cut is cut
        assert make(ConvNet, batch_norm="micro").foresee(batch, memory=memory).plan.is_cut is cut
        assert (allowed(batch).micro_batches > 1) is cut


def test_a_cut_that_is_felt_depends_on_its_rows_alone(made: list[Any]) -> None:
    """Not on what came before: the statistics of micro-batches do."""

    def step() -> Step:
        return make(ConvNet, memory=memory, batch_norm="micro")

    with pytest.raises(BudgetError) as refused:
        make(ConvNet).foresee(images(8), memory=1000)
    memory = refused.value.smallest - 1
    alone = {rows: step()(images(rows)).cut for rows in (8, 13)}
    assert all(len(cut) > 1 for cut in alone.values())
    made.clear()
    after = step()
    for rows in (13, 8, 13, 8, 8):
        assert after(images(rows)).cut == alone[rows]
    # Each number of rows once as it is, and once cut.
    expected = [(rows, refused) for rows in (13, 8) for refused in (True, False)]
    assert [(one.like.rows, bool(one.cut_refused)) for one in made] == expected


def test_single_rows_that_batch_norm_refuses_are_nobodys_plan() -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )

    with pytest.raises(BudgetError) as refused:
        make(net, sgd, batch_norm="micro").foresee(rows_of(31), memory=1000)
    assert min(make(net, sgd, memory=refused.value.smallest, batch_norm="micro")(rows_of(31)).cut) > 1
    # Where it takes single rows, they are a plan.
    with pytest.raises(BudgetError) as refused:
        make(ConvNet, batch_norm="micro").foresee(images(5), memory=1000)
    assert 1 in make(ConvNet, memory=refused.value.smallest, batch_norm="micro")(images(5)).cut


def test_plans_are_made_once(made: list[Any]) -> None:
    step = make(net, memory=40_000)  # below what two rows take with all that malloc holds
    with pytest.raises(PlanError, match=r"memory=40000, got 12 rows\. Call step\.foresee"):
        step.plan(ROWS)
    step(vectors())
    step(vectors())
    step(vectors(rows=7))
    assert len(made) == 1
    assert step.foresee(vectors(), memory=10**6).plan.rows == ROWS  # another budget is another request
    assert len(made) == 2


def test_windows_come_as_they_are_unless_they_do_not_fit() -> None:
    step, batch = make(net, memory=MEMORY), vectors(rows=24)
    whole = make(net)
    whole(batch)

    def window() -> Any:
        with step.window() as opened:
            opened.add(tuple(leaf[:20] for leaf in batch))
            opened.add(tuple(leaf[20:] for leaf in batch))
            return opened.close()

    report = window()
    assert sum(report.cut) == 24
    assert max(report.cut[:-1]) < 20
    assert report.cut[-1] == 4
    assert relative_error(parameters(step), parameters(whole)) <= 1e-4
    roomy = make(net, memory=10**6, micro_batch=4)  # a size for batches, not for windows
    with roomy.window() as opened:
        opened.add(batch)
        assert opened.close().cut == (24,)
    assert roomy(batch).cut == (4,) * 6
    assert metered(step, window, batch) <= MEMORY + sum(leaf.nbytes for leaf in batch)


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
    report = ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch)
    assert report.plan == Plan(rows=12, micro_batch=12)
    assert report.budget is None
    told = ab.plan(
        step.model,
        CROSS_ENTROPY,
        step.optimizers,
        batch,
        micro_batch=5,
        options=ab.Options(recompute=["blocks.1"]),
    )
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


def test_rows_that_are_not_on_the_meta_device_need_a_device() -> None:
    with torch.device("meta"):
        model = net()
    arguments: Any = model, CROSS_ENTROPY, adamw(model.parameters()), vectors()
    with pytest.raises(BatchError, match=r"device meta, got cpu\. To plan, name the device"):
        ab.plan(*arguments)
    assert ab.plan(*arguments, device="cpu").plan == Plan(rows=12, micro_batch=12)


def test_a_model_without_memory_and_a_batch_of_two_rows_do() -> None:
    with torch.device("meta"):
        model = Net(blocks=2)
        few = torch.zeros(2, 5, 8), torch.zeros(2, dtype=torch.long)
    wanted: tuple[Any, ...] = model, CROSS_ENTROPY, adamw(model.parameters()), few
    report = ab.plan(*wanted, rows=40, memory=100_000)
    assert report.plan.rows == 40
    assert report.plan.is_cut or report.plan.blocks
    step, batch = make(net), rows_of(40, 5, 8)
    carried_out(step, report.plan, batch)
    assert metered(step, lambda: carried_out(step, report.plan, batch), batch) == report.peak <= 100_000
    card = ab.plan(*wanted, rows=4096, memory="8MB", device="cuda:a100")  # that is not here
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
