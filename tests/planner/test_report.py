"""What planning answers, and why nothing fits."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from anybatch.batchnorm.modes import find_batch_norms
from anybatch.core.errors import BudgetError
from anybatch.engine.plan import Plan
from anybatch.memory.ledger import Holding, Ledger, Moment
from anybatch.planner.report import Option, PlanReport, refusal, single_rows
from anybatch.precision import NAMED
from anybatch.recompute.blocks import find_blocks
from tests.budgets import ConvNet, Untraceable, carried_out, make, metered, request, rows_of

LEDGER = Ledger(
    moments=(Moment(phase="forward", micro_batch=0, module="a", bytes=(1024, 0, 0, 1024, 0, 0, 0)),),
    source="predicted",
    device="cpu",
    by_module=(Holding("a", "parameters", 1024),),
)
BLOCKS = (("a", "recompute"), ("b", "selective"), ("c", "recompute"))
BEST = Plan(rows=8, micro_batch=4, blocks=BLOCKS)
NEXT = (
    Option(plan=Plan(rows=8, micro_batch=2), peak=1500, seconds=0.25, source="composed"),
    Option(plan=Plan(rows=8, micro_batch=1, blocks=BLOCKS[:1]), peak=1000, seconds=0.5, source="composed"),
)
REPORT = PlanReport(
    plan=BEST, ledger=LEDGER, seconds=0.125, budget=4096, device="cpu", options=NEXT,
    notes=("first", "second"),
)  # fmt: skip


def test_json_holds_all_of_it() -> None:
    told = json.loads(REPORT.to_json())
    assert Plan.from_json(json.dumps(told["plan"])) == BEST
    assert Ledger.from_json(json.dumps(told["ledger"])) == LEDGER
    assert [Plan.from_json(json.dumps(one["plan"])) for one in told["options"]] == [one.plan for one in NEXT]
    assert [(one["peak"], one["seconds"]) for one in told["options"]] == [(1500, 0.25), (1000, 0.5)]
    assert (told["peak"], told["budget"], told["seconds"]) == (2048, 4096, 0.125)
    assert (told["device"], told["notes"]) == ("cpu", ["first", "second"])


MOMENT = Moment(phase="update", micro_batch=0, module="", bytes=(400, 300, 800, 100, 0, 64, 0))
HELD = (
    Holding("body", "optimizer state", 800),
    Holding("body", "parameters", 400),
    Holding("", "activations", 300),
    Holding("head", "gradients", 100),
    Holding("fifth", "gradients", 64),
)
FULL_LEDGER = Ledger(moments=(MOMENT,), source="predicted", device="cpu", by_module=HELD)
LEAST = Option(
    plan=Plan(rows=8, micro_batch=2), peak=1664, seconds=1.0, source="predicted", ledger=FULL_LEDGER
)


def test_refusal_says_the_smallest_budget_and_what_holds_it_up_largest_first() -> None:
    error = refusal(LEAST, 1000, [], "")
    assert isinstance(error, BudgetError)
    assert (error.smallest, error.ledger) == (1664, FULL_LEDGER)
    told = str(error)
    assert "within 1000 B, got none" in told
    assert "8 rows is 1.6 KiB (1664 bytes), 2 rows at a time" in told
    assert "Largest: 800 B optimizer state of 'body', 400 B parameters of 'body', " in told


def test_ways_out_come_with_their_bytes_unless_these_are_next_to_nothing() -> None:
    told = str(refusal(LEAST, 1000, [], ""))
    assert all(words in told for words in ("8-bit", "600 B", 'precision="bf16-mixed"', "50 B"))
    moment = replace(MOMENT, bytes=(9000, 300, 8, 100, 0, 64, 0))
    told = str(refusal(replace(LEAST, ledger=replace(FULL_LEDGER, moments=(moment,))), 1000, [], ""))
    assert not any(words in told for words in ("8-bit", "bf16"))
    short = replace(LEAST, plan=replace(LEAST.plan, precision=NAMED["bf16-mixed"]))
    assert "bf16" not in str(refusal(short, 1000, [], ""))


@pytest.mark.parametrize("norms", [[], [nn.BatchNorm1d(2)]])
@pytest.mark.parametrize("refused", ["", "rows meet."])
def test_ways_out_of_a_cut_that_is_refused(refused: str, norms: list[nn.Module]) -> None:
    told = str(refusal(LEAST, 1000, find_batch_norms(norms), refused))
    assert ("may not be cut: rows meet." in told) is bool(refused)
    assert ("group_norm" in told) is bool(refused and norms)
    assert len(told) <= 300


@pytest.mark.parametrize("blocks", [(), (("blocks.1", "selective"),)])
def test_single_rows_are_those_of_a_real_step(blocks: tuple[tuple[str, str], ...]) -> None:
    step, batch = make(), rows_of(6, 5, 8)
    asked = request(step, batch)
    ledger = single_rows(asked.task, asked.batch, Plan(rows=0, micro_batch=0, blocks=blocks))
    every = tuple((name, "recompute") for name in find_blocks(step.model))
    plan = Plan(rows=6, micro_batch=1, blocks=blocks or every)
    carried_out(step, plan, batch)
    assert ledger is not None
    assert ledger.peak == metered(step, lambda: carried_out(step, plan, batch), batch)


def test_nobody_knows_of_what_cannot_be_traced() -> None:
    asked = request(make(Untraceable), rows_of(4))
    assert single_rows(asked.task, asked.batch, Plan(rows=0, micro_batch=0)) is None
    words = make(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten()), torch.optim.SGD)
    asked = request(words, (torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)))
    assert single_rows(asked.task, asked.batch, Plan(rows=0, micro_batch=0)) is None


def test_a_refused_step_names_the_ways_out() -> None:
    step = make(ConvNet, memory=1000)
    with pytest.raises(
        BudgetError, match=r"rows meet in 4 BatchNorm layers.*batch_norm_to_group_norm"
    ) as refused:
        step(rows_of(8, 4, 6, 6))
    assert refused.value.smallest > 1000
    with pytest.raises(BudgetError) as refused:
        make(memory=1000)(rows_of(8))
    assert "BatchNorm" not in str(refused.value)
