"""Two ranks, each with a simulated device of its own, make the update of the CPU's whole batch."""

from typing import Any

import pytest
from torch import nn

import anybatch as ab
from tests.accelerator.programs import batch, error, mean_of, moved, perceptron, reference, sgd
from tests.accelerator.simulated import load
from tests.accelerator.test_exact import LIMIT
from tests.parallel.spawned import spawned

PARTS = slice(3), slice(3, None)  # the rows of each rank


def steps(rank: int, size: int, clip_norm: float) -> tuple[float, str]:
    load()
    rows, model = batch(0), perceptron()
    expected = reference(model, [mean_of(rows)] * 2, lambda ones: nn.utils.clip_grad_norm_(ones, clip_norm))
    model = model.to("sim")
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=2, clip_norm=clip_norm)
    for _ in range(2):
        step(moved(tuple(one[PARTS[rank]] for one in rows)))
    return error(model, expected), str(next(model.parameters()).device)


@pytest.mark.slow
def test_two_ranks_with_a_device_each_are_the_whole_batch(sim: Any) -> None:
    with spawned(2) as ranks:
        for found, device in ranks.run(steps, 0.05):
            assert device == "sim:0"
            assert found <= LIMIT
