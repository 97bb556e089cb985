"""`anybatch.plan`: what a step will cost, before there is one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import torch_private as private
from anybatch.core.errors import BatchError, PlanError, TraceError
from tests.budgets import Net, Untraceable, adamw, carried_out, changed_by, make, metered, rows_of

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


@pytest.mark.parametrize("rows", [0, 1.5, "7", True])
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
    assert not report.measured
    assert not card.measured


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true", "bf16-mixed"])
@pytest.mark.parametrize("measure", [True, False])
def test_nothing_is_changed_whatever_is_planned_for(measure: bool, precision: Any) -> None:
    step, batch = make(lambda: Net(0.1, 2)), rows_of(12, 5, 8)
    step(batch)
    step.model.blocks[0].eval()
    model, optimizer = step.model, step.optimizers[0]
    reports: list[ab.PlanReport] = []

    def run() -> None:
        wanted: Any = {"memory": 60_000, "precision": precision, "measure": measure}
        reports.append(ab.plan(model, CROSS_ENTROPY, optimizer, batch, **wanted))

    def held() -> list[Any]:
        hooks = [len(vars(optimizer)[name]) for name in private.LOAD_HOOKS]
        return [*[(p.data_ptr(), p.dtype) for p in model.parameters()], *map(id, model.modules()), *hooks]

    before = held()
    assert changed_by(step, run) == []
    assert held() == before
    assert str(reports[0].plan.precision) == precision


def test_what_cannot_be_traced_is_measured_here_and_refused_elsewhere() -> None:
    step, batch = make(Untraceable), rows_of(8)
    arguments = (step.model, CROSS_ENTROPY, step.optimizers, batch)
    report = ab.plan(*arguments, memory=10**6)
    assert report.ledger.source == "measured"
    assert "measured on some of the rows given" in str(report)
    with pytest.raises(TraceError, match="nonzero"):
        ab.plan(*arguments, memory=10**6, device="cuda:a100")
