"""One plan for each shape of rows."""

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.core.batch import SampleBatch
from anybatch.core.errors import BatchError, PlanError
from anybatch.planner.cache import Budget, device_of, longest
from tests.budgets import Net, carried_out, changed_by, make, metered, request, rows_of, sgd

ROWS = 6
MEMORY = 60_000


def sparse_adam(parameters: Any) -> Any:
    words, *others = parameters
    return [torch.optim.SparseAdam([words]), torch.optim.SGD(others, lr=0.1)]


def net() -> nn.Module:
    return Net(blocks=1)


def lengths(length: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return rows_of(rows, length, 8)


def test_lengths_share_a_few_plans_that_hold_for_all(made: list[Any]) -> None:
    step = make(net)
    kept = Budget(MEMORY)
    sizes: dict[int, int] = {}
    for length in (9, 16, 13, 14, 15, 16, 9, 12, 11, 10, 40, 38):
        plan = kept.plan(request(step, lengths(length), blocks=()))
        sizes[length] = plan.micro_batch
        if length in (9, 16, 38):
            batch = lengths(length)
            carried_out(step, plan, batch)
            run = functools.partial(carried_out, step, plan, batch)
            assert metered(step, run, batch) <= MEMORY
    assert len(made) == len(kept.plans) == 4  # 9, 16, 40, and 12 for 11 and 10
    assert sizes[9] >= sizes[16] > sizes[40] >= 1


def test_fewer_rows_use_the_same_plan_and_more_do_not(made: list[Any]) -> None:
    step, kept = make(net), Budget(MEMORY)
    first = kept.plan(request(step, lengths(16), blocks=()))
    fewer = kept.plan(request(step, lengths(16, 2), blocks=()))
    assert (fewer.rows, fewer.micro_batch) == (2, min(2, first.micro_batch))
    assert len(made) == 1
    assert kept.plan(request(step, lengths(16, 7), blocks=())).rows == 7
    assert len(made) == 2


def test_plans_survive_json(made: list[Any]) -> None:
    step, kept = make(net), Budget(MEMORY)
    batches = [lengths(length) for length in (16, 15, 13, 30)]
    before = [kept.plan(request(step, batch)) for batch in batches]
    assert before[0].batch_norm is None
    count, state = len(made), json.dumps(kept.state())
    again = Budget(MEMORY)
    again.load(
        [{"memory": MEMORY, "shape": []}, *json.loads(state)]
    )  # the first as older checkpoints have it
    assert [again.plan(request(step, batch)) for batch in reversed(batches)] == before[::-1]
    assert len(made) == count
    other = Budget(MEMORY + 1)
    other.load(kept.state())
    assert other.plans == {}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


@pytest.mark.parametrize("optimizer", [sgd, lambda these: torch.optim.SGD(these, lr=0.1), sparse_adam])
def test_sparse_gradients_are_refused(optimizer: Any) -> None:
    """Their sums grow with each micro-batch, and their state with each step."""

    def refused(run: Any) -> None:
        with pytest.raises(PlanError, match=r"Expected dense gradients, got .* sparse=False"):
            run(words)

    words = torch.arange(ROWS * 3).reshape(ROWS, 3), torch.zeros(ROWS, dtype=torch.long)
    step = make(Words, optimizer, memory=10**6)
    for run in (step, step.foresee):
        assert changed_by(step, lambda run=run: refused(run)) == []
    free = make(lambda: step.model, optimizer)
    assert free(words).updated
    refused(free.foresee)
    step.model.words.sparse = False
    assert make(lambda: step.model, memory=10**6)(words).updated


def test_modules_without_shapes_are_refused() -> None:
    lazy = make(lambda: nn.Sequential(nn.LazyLinear(4)), sgd, memory=10**6)
    free = make(lambda: nn.Sequential(nn.LazyLinear(4)), sgd)
    for run in (lazy, lazy.foresee, free.foresee):
        with pytest.raises(PlanError, match="shapes are known where memory is planned, got LazyLinear"):
            run(rows_of(8))
    assert free(rows_of(8)).updated
    assert free.foresee(rows_of(8)).peak > 0


def test_a_model_on_several_devices_is_refused() -> None:
    task = make(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, device="meta"))).task()
    assert device_of(task).kind == "cpu"
    with pytest.raises(PlanError, match=r"on one device.*\['cpu', 'cuda:1'\]"):
        device_of(
            replace(
                task, network=replace(task.network, devices={torch.device("cpu"), torch.device("cuda:1")})
            )
        )


def test_what_is_trained_later_is_planned_anew() -> None:
    step, batch = make(Net, memory=60_000), rows_of(40, 5, 8)
    for block in step.model.blocks:
        block.requires_grad_(False)
    step(batch)
    for block in step.model.blocks:
        block.requires_grad_(True)
    for _ in range(3):
        step(batch)
    assert len(step.planning.budget._measured) == 2
    assert metered(step, lambda: step(batch), batch) <= 60_000


# ---- shapes


def test_samples_are_planned_for_the_longest_of_each() -> None:
    seen: list[int] = []

    def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        seen.append(len(samples))
        torch.rand(1)
        x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return x, torch.zeros(len(samples), dtype=torch.long)

    state = torch.get_rng_state()
    batch = SampleBatch([torch.zeros(2 + row, 8) for row in range(11)], collate)
    assert longest(batch) == (("torch.float32", (12, 8)), ("torch.int64", ()))
    assert seen == [8, 3]
    assert torch.equal(torch.get_rng_state(), state)
    batch = SampleBatch([0] * 9, lambda rows: torch.zeros([1] * len(rows)))
    with pytest.raises(BatchError, match="tensors of the same kinds"):
        longest(batch)
