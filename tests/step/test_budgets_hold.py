"""Budgets that survive: any number of out-of-memory errors, and what was traced or refused without need."""

import copy
import random
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.engine import strategy, window
from anybatch.testing import relative_error, tolerance
from tests.faults.faulty import spread
from tests.options import flat
from tests.zoo import Limited, Perceptron

STEPS = 12


def limited() -> Limited:
    torch.manual_seed(0)
    return Limited(body=Perceptron(width=64)).double()


def by_rows(model: nn.Module, micro: Any) -> ab.Total:
    return ab.Total(F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[0]))


LOSSES = {"torch's": nn.CrossEntropyLoss(), "own": by_rows, "whole batch": ab.WholeBatch(spread)}


def make(model: nn.Module, loss: Any, **options: Any) -> ab.Step:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), **flat(options))


def run(seed: int) -> None:
    """Out of memory in drawn steps of a drawn budget: all updates are made, and equal to undisturbed ones."""
    drawn = random.Random(seed)
    loss, rows = LOSSES[drawn.choice([*LOSSES])], drawn.randint(5, 70)
    memory: Any = drawn.choice(["auto", 200_000, 400_000, 10_000_000])
    model = limited()
    twin = copy.deepcopy(model)
    step, plain = make(model, loss, memory=memory), make(twin, loss)
    for index in range(STEPS):
        batch = torch.randn(rows, 6).double(), torch.randint(4, (rows,))
        model.most = drawn.randint(1, rows) if index and drawn.random() < 0.4 else model.most
        assert step(batch).updated
        assert plain(batch).updated
    named = [dict(one.named_parameters()) for one in (model, twin)]
    assert relative_error(*named) <= tolerance(torch.float64, rows * STEPS), seed


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_survives_any_number_of_out_of_memory_errors(seed: int) -> None:
    torch.manual_seed(seed)
    run(seed)


@pytest.mark.parametrize(("where", "place"), [(strategy, "norm_of"), (window, "clip")])
def test_memory_that_runs_out_after_the_last_micro_batch_is_tried_in_smaller_parts(
    where: ModuleType, place: str, monkeypatch: Any
) -> None:
    found, calls = getattr(where, place), list[int]()

    def fails_once(*values: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("planted")
        return found(*values)

    model, batch = limited(), (torch.randn(9, 6).double(), torch.randint(4, (9,)))
    twin = copy.deepcopy(model)
    step = make(model, nn.CrossEntropyLoss(), clip_norm=0.1, check=False)
    monkeypatch.setattr(where, place, fails_once)
    report = step(batch)
    make(twin, nn.CrossEntropyLoss(), clip_norm=0.1)(batch)
    assert (report.updated, report.micro_batches, len(calls) > 1) == (True, 2, True)
    named = [dict(one.named_parameters()) for one in (model, twin)]
    assert relative_error(*named) <= tolerance(torch.float64, 9)


def test_auto_keeps_the_cut_by_length() -> None:
    tokens = (torch.arange(40) <= torch.arange(32)[:, None]).long()
    model = nn.Sequential(nn.Embedding(3, 4, padding_idx=0), nn.Linear(4, 3))

    def loss(model: nn.Module, micro: Any) -> ab.Total:
        scores = model(micro[0])
        lengths.append(scores.shape[:2])
        return ab.Total((scores.square().sum(-1) * (micro[0] != 0)).sum(), (micro[0] != 0).sum())

    lengths: list[Any] = []
    step = make(model, loss, memory="auto", order="length")
    step((tokens, torch.zeros(32)))
    lengths.clear()
    assert step((tokens, torch.zeros(32))).micro_batches > 1
    assert sum(rows * length for rows, length in lengths) < 0.75 * 32 * 32
