"""Recordings cut into stretches, and storages told from one another."""

import itertools

import pytest
import torch
from torch import nn

from anybatch import Plan, Step
from anybatch.core.batch import TensorBatch
from anybatch.planner.cost import Recorded, stretches
from anybatch.planner.trace import trace
from anybatch.recompute.blocks import find_blocks
from benchmarks.zoo import OPTIMIZERS, ZOO


def test_stretches_cover_all_events_in_order() -> None:
    made = (entry := ZOO["unet"]).build("small")
    task, blocks = entry.step(made, OPTIMIZERS["adamw"](made.model)).task(), find_blocks(made.model)
    batch = TensorBatch(made.batch_of(4, torch.Generator().manual_seed(0)))
    recording = trace(Plan(rows=4, micro_batch=2), task, batch).recording
    found = stretches(recording, blocks)
    assert found[0].start == 0
    assert found[-1].stop == len(recording.storages)
    assert all(one.stop == other.start for one, other in itertools.pairwise(found))
    assert {one.place.block for one in found} == {"", *blocks}


def test_recordings_of_other_steps_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    step = Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = TensorBatch((torch.zeros(4, 2), torch.zeros(4, 2)))
    uncut, cut = [trace(Plan(rows=4, micro_batch=size), step.task(), batch).recording for size in (4, 2)]
    with pytest.raises(ValueError, match="two recordings of the same step"):
        Recorded(sizes=(2, 4), recordings=(cut, uncut), blocks=())
