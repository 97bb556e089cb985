"""`anybatch.plan`: what a step will cost, before there is one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.errors import BatchError, BudgetError, PlanError, TraceError
from tests.budgets import Net, Untraceable, adamw, carried_out, changed_by, make, metered, rows_of, sgd

CROSS_ENTROPY = nn.CrossEntropyLoss()


def net() -> nn.Module:
    return Net(blocks=2)


def test_without_a_budget_nothing_is_chosen() -> None:
    step, batch = make(net), rows_of(12, 5, 8)
    report = ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch)
    assert report.plan == ab.Plan(rows=12, micro_batch=12)
    assert (report.budget, report.measured) == (None, False)
    told = ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch, micro_batch=5, recompute=["blocks.1"])
    assert told.plan == ab.Plan(rows=12, micro_batch=5, blocks=(("blocks.1", "recompute"),))
    carried_out(step, told.plan, batch)
    assert metered(step, lambda: carried_out(step, told.plan, batch), batch) == told.peak


@pytest.mark.parametrize("rows", [0, -3, 1.5, "7", True])
def test_no_number_of_rows_is_refused_by_its_name(rows: Any) -> None:
    step, batch = make(net), rows_of(12, 5, 8)
    with pytest.raises(PlanError, match=rf"^Expected rows to be a whole .*, got {rows!r}\. Leave it out"):
        ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch, rows=rows)
    counted = ab.plan(step.model, CROSS_ENTROPY, step.optimizers, batch, rows=np.int64(7))
    assert counted.plan.to_json() == ab.Plan(rows=7, micro_batch=7).to_json()


def test_rows_that_are_not_on_the_meta_device_need_a_device() -> None:
    with torch.device("meta"):
        model = net()
    arguments: Any = model, CROSS_ENTROPY, adamw(model.parameters()), rows_of(12, 5, 8)
    with pytest.raises(BatchError, match=r"device meta, got cpu\. To plan, name the device"):
        ab.plan(*arguments)
    assert ab.plan(*arguments, device="cpu").plan == ab.Plan(rows=12, micro_batch=12)


def test_a_model_without_memory_and_a_batch_of_two_rows_do() -> None:
    with torch.device("meta"):
        model = Net(blocks=2)
        few = torch.zeros(2, 5, 8), torch.zeros(2, dtype=torch.long)
    optimizer = adamw(model.parameters())
    report = ab.plan(model, CROSS_ENTROPY, optimizer, few, rows=40, memory=100_000)
    assert report.plan.rows == 40
    assert report.plan.is_cut or report.plan.blocks
    assert not report.measured
    step, batch = make(net), rows_of(40, 5, 8)
    carried_out(step, report.plan, batch)
    assert metered(step, lambda: carried_out(step, report.plan, batch), batch) == report.peak <= 100_000


def test_a_card_that_is_not_here() -> None:
    step, batch = make(net), rows_of(12, 5, 8)
    report = ab.plan(
        step.model, CROSS_ENTROPY, step.optimizers, batch, rows=4096, memory="8MB", device="cuda:a100"
    )
    assert report.device == "cuda:a100"
    assert report.ledger.device == "cuda"
    assert report.peak % 512 == 0
    assert report.peak <= 8 * 10**6
    assert not report.measured


@pytest.mark.parametrize("measure", [True, False])
def test_nothing_is_changed(measure: bool) -> None:
    step, batch = make(lambda: Net(0.1, 2)), rows_of(12, 5, 8)
    step(batch)
    step.model.blocks[0].eval()
    run = lambda: ab.plan(  # noqa: E731
        step.model, CROSS_ENTROPY, step.optimizers, batch, memory=60_000, measure=measure
    )
    assert changed_by(step, run) == []


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true", "bf16-mixed"])
@pytest.mark.parametrize("measure", [True, False])
def test_a_precision_is_planned_for_and_the_model_stays_as_it_is(measure: bool, precision: str) -> None:
    step, batch = make(lambda: Net(0.1, 2)), rows_of(12, 5, 8)
    step(batch)
    reports: list[ab.PlanReport] = []
    storage = [parameter.data_ptr() for parameter in step.model.parameters()]
    run = lambda: reports.append(  # noqa: E731
        ab.plan(
            step.model,
            CROSS_ENTROPY,
            step.optimizers,
            batch,
            memory=60_000,
            precision=precision,
            measure=measure,
        )
    )
    assert changed_by(step, run) == []
    assert [parameter.data_ptr() for parameter in step.model.parameters()] == storage
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.float32}
    assert str(reports[0].plan.precision) == precision


def test_several_optimizers() -> None:
    model = Net(blocks=2)
    optimizers = [sgd(model.blocks.parameters()), adamw(model.head.parameters())]
    step, batch = ab.Step(model, CROSS_ENTROPY, optimizers), rows_of(12, 5, 8)
    report = ab.plan(model, CROSS_ENTROPY, optimizers, batch, memory=50_000, measure=False)
    carried_out(step, report.plan, batch)
    assert metered(step, lambda: carried_out(step, report.plan, batch), batch) == report.peak <= 50_000


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return rows, torch.tensor([y for _, y in samples])


def test_samples_with_a_collate() -> None:
    samples: list[Any] = [(torch.randn(2 + row % 4, 8), row % 4) for row in range(12)]
    step = make(net, collate=padded, memory=40_000)
    report = step.foresee(samples)
    assert (
        ab.plan(
            step.model, CROSS_ENTROPY, step.optimizers, samples, collate=padded, memory=40_000, measure=False
        ).plan.rows
        == 12
    )
    assert step(samples).cut == report.plan.sizes
    assert report.plan.is_cut or report.plan.blocks
    assert metered(step, lambda: step(samples), samples) <= 40_000


def test_a_loss_over_all_rows() -> None:
    loss = ab.WholeBatch(lambda outputs, target: nn.functional.cross_entropy(outputs @ outputs.T, target))
    step, batch = make(net), rows_of(4, 5, 8)
    whole = ab.Step(step.model, loss, step.optimizers)
    most = whole.foresee(batch).peak
    report = ab.plan(step.model, loss, step.optimizers, batch, memory=most - 1, measure=False)
    carried_out(whole, report.plan, batch)
    assert metered(whole, lambda: carried_out(whole, report.plan, batch), batch) == report.peak < most


def test_what_cannot_be_traced_is_measured_here_and_refused_elsewhere() -> None:
    step, batch = make(Untraceable), rows_of(8)
    arguments = (step.model, CROSS_ENTROPY, step.optimizers, batch)
    report = ab.plan(*arguments, memory=10**6)
    assert report.ledger.source == "measured"
    assert "measured on some of the rows given" in str(report)
    with pytest.raises(TraceError, match="nonzero"):
        ab.plan(*arguments, memory=10**6, device="cuda:a100")


def test_smallest_budget() -> None:
    step, batch = make(net), rows_of(12, 5, 8)
    arguments = (step.model, CROSS_ENTROPY, step.optimizers, batch)
    with pytest.raises(BudgetError) as refused:
        ab.plan(*arguments, memory="1KB")
    assert ab.plan(*arguments, memory=refused.value.smallest).peak == refused.value.smallest
    with pytest.raises(BudgetError):
        ab.plan(*arguments, memory=refused.value.smallest - 1)


def test_a_short_precision_leaves_model_and_optimizer_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    modules = list(model)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    for _ in range(2):
        ab.plan(model, nn.MSELoss(), optimizer, batch, precision="fp16-true")
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(model) == modules
    assert not model._forward_hooks
