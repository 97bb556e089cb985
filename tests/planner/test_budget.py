"""A budget: readings for each kind of rows, kept as JSON; and what no budget can serve."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step
from anybatch.core import PlanError
from anybatch.planner import Budget
from tests.budgets import changed_by, make, metered, net, rows_of, sgd
from tests.zoo import Made

ROWS = 6
# Bytes for which a few rows of 1,000 numbers fit, and none without recompute.
PLAIN, TIGHT = 1_500_000, 1_050_000


def lengths(length: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return rows_of(rows, length, 8)


def budget_of(step: Step) -> Budget:
    assert step.planning.budget is not None
    return step.planning.budget


def resumed(step: Step, memory: int) -> Step:
    """A step that goes on from the weights and the readings of another, through JSON."""
    other = make(memory=memory)
    other.model.load_state_dict(step.model.state_dict())
    other.optimizers[0].load_state_dict(step.optimizers[0].state_dict())
    budget_of(other).load(json.loads(json.dumps(budget_of(step).state())))
    return other


def outcome(step: Step, batch: Any) -> tuple[tuple[int, ...], int]:
    cut = step(batch).cut
    return cut, "recomputed" in step.planning.explain()


@pytest.mark.parametrize("memory", [PLAIN, TIGHT])
def test_a_run_that_goes_on_cuts_as_the_unbroken_one(memory: int, made: list[Any]) -> None:
    unbroken, batches = make(memory=memory), [lengths(n) for n in (1000, 600, 900, 700, 1000, 800)]
    expected = [outcome(unbroken, batch) for batch in batches]
    first = make(memory=memory)
    assert [outcome(first, batch) for batch in batches[:3]] == expected[:3]
    second = resumed(first, memory)
    assert [outcome(second, batch) for batch in batches[3:]] == expected[3:]
    assert expected[0][1] is (memory == TIGHT)
    assert not made


def test_another_budgets_readings_are_not_taken_over() -> None:
    step = make(memory=10**8)
    step(lengths(600, 12))
    other = Budget(10**8 + 1)
    other.load(budget_of(step).state())
    assert other.state() == []


def test_kinds_of_rows_settings_and_trained_parameters_have_ladders_of_their_own(made: list[Any]) -> None:
    step, batch = make(net, lambda these: torch.optim.SGD(these), memory=3_000_000), lengths(400)
    budget = budget_of(step)
    step(batch)
    step(lengths(300))
    assert len(budget.state()) == 1  # lengths share one
    step.model.body.blocks.requires_grad_(False)
    step(batch)
    step.model.double()
    step((batch[0].double(), batch[1]))
    assert len(budget.state()) == 3
    step.model.float().body.blocks.requires_grad_(True)
    for _ in range(2):
        step(batch)
    assert metered(step, lambda: step(batch), batch) <= 3_000_000
    assert len(budget.state()) == 3
    budget.forget()
    assert budget.state() == []
    assert not made


def sparse_words() -> nn.Module:
    words = nn.Embedding(50, 8, sparse=True)
    return Made(lambda self, ids: self.head(self.words(ids).mean(1)), words=words, head=nn.Linear(8, 4))


def sparse_adam(parameters: Any) -> Any:
    words, *others = parameters
    return [torch.optim.SparseAdam([words]), torch.optim.SGD(others, lr=0.1)]


@pytest.mark.parametrize("optimizer", [sgd, sparse_adam])
def test_sparse_gradients_are_refused(optimizer: Any) -> None:
    """Their sums grow with each micro-batch, and their state with each step."""

    def refused(run: Any) -> None:
        with pytest.raises(PlanError, match=r"Expected dense gradients, got .* sparse=False"):
            run(words)

    words = torch.arange(ROWS * 3).reshape(ROWS, 3), torch.zeros(ROWS, dtype=torch.long)
    step = make(sparse_words, optimizer, memory=10**6)
    for run in (step, step.foresee):
        assert changed_by(step, lambda run=run: refused(run)) == []
    free = make(lambda: step.model, optimizer)
    assert free(words).updated
    refused(free.foresee)
    step.model.words.sparse = False
    assert make(lambda: step.model, memory=10**6)(words).updated
