"""Recordings at another size, told by the kept step, against those that were really made."""

from array import array

import pytest
import torch

from anybatch import Plan
from anybatch.core.batch import TensorBatch
from anybatch.memory.recording import OTHER, Mark, Recording
from anybatch.planner.cost import resized
from anybatch.planner.trace import trace
from anybatch.recompute.blocks import find_blocks
from benchmarks.zoo import OPTIMIZERS, ZOO

LIMIT = 0.02  # of the work, which only estimates of seconds need


def step(*sizes: int, marks: tuple[Mark, ...] = (Mark(0, "start", -1, "", 0, 0, 0),)) -> Recording:
    """One storage of each size, none of which ends."""
    return Recording(
        storages=array("q", range(len(sizes))),
        before=array("q", [0] * len(sizes)),
        after=array("q", sizes),
        marks=marks,
        owners=(OTHER,) * len(sizes),
        places=("",) * len(sizes),
    )


@pytest.mark.parametrize("name", ["unet", "bert", "gpt2", "t5"])
@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
def test_as_if_it_had_been_recorded(name: str, policy: str) -> None:
    made = (entry := ZOO[name]).build("small")
    task = entry.step(made, OPTIMIZERS["adamw"](made.model)).task()
    batch = TensorBatch(made.batch_of(4, torch.Generator().manual_seed(0)))

    def recorded(size: int, policy: str) -> Recording:
        blocks = () if policy == "keep" else tuple((block, policy) for block in find_blocks(made.model))
        return trace(Plan(rows=2 * size, micro_batch=size, blocks=blocks), task, batch).recording

    here, there, wanted = recorded(5, "keep"), recorded(2, "keep"), recorded(2, policy)
    found = resized(recorded(5, policy), here=here, there=there)
    assert found is not None
    assert (found.storages, found.before, found.after) == (wanted.storages, wanted.before, wanted.after)
    assert found.marks[-1].operations == wanted.marks[-1].operations
    for done, exact in zip(found.marks[-1][-2:], wanted.marks[-1][-2:], strict=True):
        assert abs(done - exact) <= LIMIT * exact


def test_sizes_that_do_not_tell_are_left_alone() -> None:
    assert resized(step(10), here=step(10, 10), there=step(4, 4)) is not None
    assert resized(step(10), here=step(10, 10), there=step(10, 4)) is None  # a weight, or an activation
    assert resized(step(11), here=step(10, 10), there=step(4, 4)) is None  # of which the kept step has none
    assert resized(step(20), here=step(10, 10, 20), there=step(10, 4, 8)) is not None  # others do not matter


def test_what_is_rebuilt_grows_as_its_forward() -> None:
    def marked(*work: int) -> tuple[Mark, ...]:
        """Forward and backward of a block, and the work done by the end of each."""
        phases = ("start", "forward", "backward", "update")
        return tuple(Mark(0, one, 0, "a", 0, done, done) for one, done in zip(phases, work, strict=True))

    here, there = step(marks=marked(0, 0, 50, 150)), step(marks=marked(0, 0, 20, 70))
    marks = (
        *marked(0, 0, 50, 50)[:2],
        Mark(0, "recompute", 0, "a", 0, 50, 50),
        Mark(0, "backward", 0, "a", 0, 100, 100),
        Mark(0, "update", 0, "a", 0, 200, 200),
    )
    found = resized(step(marks=marks), here=here, there=there)
    assert found is not None
    assert [one.flops for one in found.marks] == [one.moved for one in found.marks] == [0, 0, 20, 40, 90]
