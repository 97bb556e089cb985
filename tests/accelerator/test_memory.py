"""Out of memory on an accelerator with a hard limit: an exact update, or one error and all as before."""

import gc
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import OutOfMemoryError
from tests.accelerator.programs import CLASSES, Batch, contrast, error, mean_of, moved, reference, sgd
from tests.accelerator.simulated import limited, load
from tests.accelerator.test_exact import LIMIT
from tests.snapshots import assert_same, snapshot

FEATURES, ROWS = 6, 24
SEEDS, MANY = range(8), range(8, 76)  # many: with three ways about 200 limits


def take(way: str, step: ab.Step, rows: Batch) -> None:
    """Make an update; a window's later `add` may fail when the first is done."""
    if way != "window":
        step(rows)
        return
    with step.window() as opened:
        for start in (0, 9):
            opened.add(tuple(one[start : start + 9 + 99 * start] for one in rows))


def made(way: str, draw: random.Random) -> tuple[ab.Step, nn.Module, Batch]:
    """A step on the device, the model that is expected after each update, and a batch."""
    torch.manual_seed(draw.randrange(2**31))
    width, rows = draw.choice((16, 64)), draw.randint(ROWS // 2, ROWS)
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()
    x, y = torch.randn(rows, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (rows,))
    there = reference(model, []).to("sim")
    options = ab.Options(check=draw.random() < 0.5)
    loss = ab.WholeBatch(contrast) if way == "whole batch" else nn.CrossEntropyLoss()
    return ab.Step(there, loss, sgd(there), options=options), model, (x, y)


def drawn(way: str, seed: int) -> tuple[int, int, int]:
    """Three batches under a drawn limit: updates made, errors raised, allocations that the device refused."""
    sim = load()
    # Of the look before the first split: memory ran out in a few rows, or in one of their splits.
    warnings.filterwarnings("ignore", "Expected to find the same loss and gradient .*[mM]emory")
    trial, _, (x, y) = made(way, random.Random(seed))
    rows = moved((x, y))
    sim.reset_peak_memory_stats()
    take(way, trial, rows)
    peak = sim.max_memory_allocated()
    del trial, rows
    gc.collect()
    gc.freeze()  # each recovery collects garbage, which takes long with all of torch

    draw = random.Random(seed)
    tested, model, (x, y) = made(way, draw)
    rows, mean = moved((x, y)), mean_of((x, y))
    if way == "whole batch":
        mean = lambda one: contrast(one(x), y)  # noqa: E731
    floor, updates, errors, refused = sim.memory_allocated(), 0, 0, sim.native.refused()
    limit = floor + int((peak - floor) * draw.uniform(0.2, 0.95))
    for _ in range(3):
        before, states = snapshot(tested), sim.get_rng_state()
        room = sim.memory_allocated() - floor  # the snapshot's
        try:
            with limited(limit + room):
                take(way, tested, rows)
        except OutOfMemoryError:
            errors += 1
            assert_same(before, snapshot(tested))
            assert torch.equal(states, sim.get_rng_state())
        else:
            updates += 1
            model = reference(model, [mean])
        del before
        assert error(tested.model, model) <= LIMIT
    return updates, errors, sim.native.refused() - refused


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["step", "window", "whole batch"])
def test_out_of_memory_gives_an_exact_update_or_changes_nothing(sim: Any, way: str, seeds: range) -> None:
    found = [sim(drawn, way, seed) for seed in seeds]
    updates, errors, refused = map(sum, zip(*found, strict=True))
    assert updates > len(seeds) // 2
    assert errors > 0
    assert refused > errors
