"""Candidates: a traced step is the real one to the byte; costs of other sizes are the traced ones, nearly."""

from dataclasses import replace

import torch

from anybatch.memory.device import find_device
from anybatch.planner.candidates import Candidates
from anybatch.planner.cost import KEEP
from tests.budgets import (
    ConvNet,
    Net,
    images,
    make,
    request,
    rows_of,
)


def test_seconds_follow_the_work() -> None:
    candidates = Candidates(asked := request(make(ConvNet), images()))
    kept, rebuilt = [candidates.seconds(candidates.trace(asked.uniform(24, p))) for p in (KEEP, "recompute")]
    assert 0 < kept < rebuilt < 2 * kept
    card, took = replace(find_device("cpu"), flops=1.0, half_flops=2.0), list[float]()
    for dtype in (torch.float32, torch.bfloat16):
        asked = request(make(Net, dtype=dtype), rows_of(4, dtype=dtype), device=card)
        took.append((found := Candidates(asked)).seconds(found.trace(asked.like)))
    assert took[0] > 1.9 * took[1]


def test_optimizers_that_could_go_one_by_one() -> None:
    for given, device, expected in (
        ({}, "cpu", False),
        ({}, "cuda:t4", True),
        ({"foreach": True}, "cpu", True),
        ({"foreach": False}, "cuda:t4", False),
        ({"fused": True}, "cuda:t4", False),
    ):
        step = make()
        step.optimizers[0].param_groups[0].update(given)
        assert request(step, rows_of(), device=find_device(device)).may_disable_foreach is expected
