"""Two ranks, each with a simulated device of its own, make the update of the CPU's whole batch."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from tests.accelerator.programs import batch, contrast, error, mean_of, moved, perceptron, reference, sgd
from tests.accelerator.simulated import load
from tests.accelerator.test_exact import LIMIT
from tests.parallel.spawned import spawned

PARTS = slice(3), slice(3, None)  # the rows of each rank


def steps(rank: int, size: int, way: str) -> tuple[float, str]:
    load()
    rows, model = batch(0), perceptron()
    mean = (lambda one: contrast(one(rows[0]), rows[1])) if way == "whole batch" else mean_of(rows)
    clip = (lambda ones: nn.utils.clip_grad_norm_(ones, 0.05)) if way == "clipped" else None
    expected = reference(model, [mean] * 2, clip)
    model = model.to("sim")
    loss = ab.WholeBatch(contrast) if way == "whole batch" else nn.CrossEntropyLoss()
    step = ab.Step(model, loss, sgd(model), micro_batch=2, clip_norm=0.05 if clip else None)
    for _ in range(2):
        step(moved(tuple(one[PARTS[rank]] for one in rows)))
    return error(model, expected), str(next(model.parameters()).device)


@pytest.mark.slow
def test_two_ranks_with_a_device_each_are_the_whole_batch(sim: Any) -> None:
    with spawned(2) as ranks:
        torch.manual_seed(0)
        for way in ("plain", "clipped", "whole batch"):
            for found, device in ranks.run(steps, way):
                assert device == "sim:0"
                assert found <= LIMIT, way
