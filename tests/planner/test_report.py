"""What planning answers, and why nothing fits."""

import re
from typing import Any

import pytest
import torch

from anybatch.core.errors import BudgetError
from anybatch.engine.plan import Plan
from anybatch.planner.report import Option
from tests.budgets import ConvNet, Net, adamw, make, rows_of

BLOCKS = (("a", "recompute"), ("b", "selective"), ("c", "recompute"))
NEXT = (
    Option(plan=Plan(rows=8, micro_batch=2), peak=1500, seconds=0.25),
    Option(plan=Plan(rows=8, micro_batch=1, blocks=BLOCKS[:1]), peak=1000, seconds=0.5),
)


def plain(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def refused(model: Any, batch: Any, *options: Any, memory: int = 1000, **named: Any) -> BudgetError:
    """The error for a budget in which parameters, gradients and optimizer state fit, and nothing else."""
    with pytest.raises(BudgetError) as error:
        make(model, *options, memory=memory, **named).foresee(batch)
    if "without a single row" in str(error.value):
        return refused(model, batch, *options, memory=error.value.smallest, **named)
    assert error.value.smallest > memory
    return error.value


def test_a_refused_step_names_the_ways_out() -> None:
    told = str(refused(ConvNet, rows_of(8, 4, 6, 6)))
    assert re.search(r"rows meet in 4 BatchNorm layers.*batch_norm_to_group_norm", told)
    for optimizer, precision, has_state in ((adamw, "float32", True), (plain, "bf16-mixed", False)):
        error = refused(Net, rows_of(64, 5, 8), optimizer, precision=precision)
        told, least = str(error), error.smallest
        assert all(words in told for words in ("within ", f"({least} bytes)", "largest: 10.5 KiB input"))
        assert ("8-bit" in told, "bf16-mixed" in told) == (has_state, precision == "float32")
        assert "BatchNorm" not in told
        assert len(told) <= 300
