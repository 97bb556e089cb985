"""Budgets that survive: any number of out-of-memory errors, and what was traced or refused without need."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine import strategy, window
from anybatch.testing import relative_error, tolerance
from tests.options import flat
from tests.zoo import Limited, Perceptron


def limited() -> Limited:
    torch.manual_seed(0)
    return Limited(body=Perceptron(width=64)).double()


def make(model: nn.Module, loss: Any, **options: Any) -> ab.Step:
    return ab.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), **flat(options))


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
