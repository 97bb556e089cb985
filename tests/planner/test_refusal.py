"""Why nothing fits: the numbers in the message are those of a real step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from anybatch.batchnorm.modes import find_batch_norms
from anybatch.core.errors import BudgetError
from anybatch.engine.plan import FLOAT32, Plan
from anybatch.memory.ledger import Holding, Ledger, Moment
from anybatch.planner.report import Option, refusal, single_rows, suggestions
from anybatch.recompute.blocks import find_blocks
from tests.budgets import ConvNet, Untraceable, carried_out, make, metered, question, rows_of

MOMENT = Moment(phase="update", micro_batch=0, module="", bytes=(400, 300, 800, 100, 0, 64, 0))
HELD = (
    Holding("body", "optimizer state", 800),
    Holding("body", "parameters", 400),
    Holding("", "activations", 300),
    Holding("head", "gradients", 100),
    Holding("fifth", "gradients", 64),
)
LEDGER = Ledger(moments=(MOMENT,), source="predicted", device="cpu", by_module=HELD)
LEAST = Option(plan=Plan(rows=8, micro_batch=2), peak=1664, seconds=1.0, source="predicted", ledger=LEDGER)


def test_refusal_says_the_smallest_budget_and_what_holds_it_up_largest_first() -> None:
    error = refusal(LEAST, 1000, [], "")
    assert isinstance(error, BudgetError)
    assert (error.smallest, error.ledger) == (1664, LEDGER)
    told = str(error)
    assert "within 1000 B, got none" in told
    assert "8 rows is 1.6 KiB (1664 bytes), with 2 rows at a time" in told
    places = [
        told.index(words)
        for words in (
            "800 B optimizer state of 'body'",
            "400 B parameters of 'body'",
            "300 B activations of the model",
            "100 B gradients of 'head'",
        )
    ]
    assert places == sorted(places)
    assert "fifth" not in told
    assert "BatchNorm" not in told
    assert "may not be cut" not in told


@pytest.mark.parametrize(("source", "word"), [("composed", "about"), ("measured", "at least")])
def test_of_what_was_not_run_it_says_what_is_known(source: str, word: str) -> None:
    error = refusal(replace(LEAST, source=source, ledger=None), 1000, [], "rows meet.")
    assert (error.smallest, error.ledger) == (1664, None)
    assert f"is {word} 1.6 KiB (1664 bytes), with 2 rows at a time. It was not run" in str(error)
    assert str(error).endswith("The batch may not be cut: rows meet.")


def test_suggestions_come_with_their_bytes() -> None:
    assert suggestions(LEDGER, [], "", FLOAT32) == [
        "8-bit optimizer states would free about 600 B.",
        'Activations in 16 bits, precision="bf16-mixed", would free up to 50 B.',
    ]
    stateless = Ledger(
        moments=(Moment(phase="loss", micro_batch=0, module="", bytes=(8, 0, 0, 0, 0, 0, 0)),),
        source="measured",
        device="cpu",
        by_module=(),
    )
    assert not any("8-bit" in way for way in suggestions(stateless, [], "", FLOAT32))


def test_what_frees_next_to_nothing_is_not_suggested() -> None:
    moment = Moment(phase="update", micro_batch=0, module="", bytes=(9000, 300, 8, 100, 0, 64, 0))
    ledger = Ledger(moments=(moment,), source="predicted", device="cpu", by_module=HELD)
    assert suggestions(ledger, [], "", FLOAT32) == []
    least = Option(
        plan=Plan(rows=1, micro_batch=1), peak=9472, seconds=1.0, source="predicted", ledger=ledger
    )
    told = str(refusal(least, 1000, [], ""))
    assert "for a batch of 1 row is 9.2 KiB (9472 bytes), with 1 row at a time. Largest first" in told
    assert told.endswith(". Allow that much, or make rows smaller or the model.")


def test_ways_out_of_a_cut_that_is_refused() -> None:
    norms = find_batch_norms([nn.BatchNorm1d(2)])
    assert suggestions(LEDGER, norms, "rows meet.", FLOAT32)[:2] == [
        "The batch may not be cut: rows meet.",
        "With ab.batch_norm_to_group_norm(model), or batch_norm=..., it may be cut.",
    ]
    assert not any(
        "BatchNorm" in way or "group_norm" in way for way in suggestions(LEDGER, norms, "", FLOAT32)
    )
    assert "group_norm" in str(refusal(LEAST, 1, norms, "rows meet."))


@pytest.mark.parametrize("blocks", [(), (("blocks.1", "selective"),)])
def test_single_rows_are_those_of_a_real_step(blocks: tuple[tuple[str, str], ...]) -> None:
    step, batch = make(), rows_of(6, 5, 8)
    asked = question(step, batch)
    ledger = single_rows(asked.task, asked.batch, Plan(rows=0, micro_batch=0, blocks=blocks))
    every = tuple((name, "recompute") for name in find_blocks(step.model))
    plan = Plan(rows=6, micro_batch=1, blocks=blocks or every)
    carried_out(step, plan, batch)
    assert ledger is not None
    assert ledger.peak == metered(step, lambda: carried_out(step, plan, batch), batch)


def test_nobody_knows_of_what_cannot_be_traced() -> None:
    asked = question(make(Untraceable), rows_of(4))
    assert single_rows(asked.task, asked.batch, Plan(rows=0, micro_batch=0)) is None
    words = make(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten()), torch.optim.SGD)
    asked = question(words, (torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)))
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
