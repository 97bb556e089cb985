"""Bytes and seconds at other sizes and of mixtures."""

import itertools
import random
from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from anybatch import Plan, Step, Total
from anybatch.core.batch import TensorBatch
from anybatch.memory.device import find_device
from anybatch.memory.recording import OTHER, Mark, Recording
from anybatch.planner.cost import PolicyRecordings, Recorded, resized, stretches
from anybatch.planner.mixture import KEEP
from anybatch.planner.trace import trace
from anybatch.recompute import offload
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


# ---- resize


LIMIT = 0.03  # of the work, which only estimates of seconds need; 0.02 of newer torch than 2.6


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


# ---- segments


POLICIES = (KEEP, "recompute", "selective")
SIZES = (2, 3)


class Setting:
    """A small model of the zoo, and its recordings."""

    def __init__(self, name: str) -> None:
        entry = ZOO[name]
        made = entry.build("small")
        self.step = entry.step(made, OPTIMIZERS["adamw"](made.model))
        self.task = self.step.task()
        self.batch = TensorBatch(made.batch_of(4, torch.Generator().manual_seed(0)))
        self.blocks = find_blocks(made.model)

    def plan(self, rows: int, size: int, choice: dict[str, str]) -> Plan:
        return Plan(rows=rows, micro_batch=size, blocks=tuple(choice.items()))

    def recording(self, rows: int, size: int, choice: dict[str, str], device: str = "cpu") -> Recording:
        return trace(self.plan(rows, size, choice), self.task, self.batch, device=device).recording

    def recordings(self, policies: tuple[str, ...] = POLICIES, device: str = "cpu") -> PolicyRecordings:
        recorded: dict[str, Recorded] = {}
        for policy in policies:
            choice = {} if policy == KEEP else dict.fromkeys(self.blocks, policy)
            one, other = [self.recording(2 * size, size, choice, device) for size in SIZES]
            recorded[policy] = Recorded(sizes=SIZES, recordings=(one, other), blocks=self.blocks)
        return PolicyRecordings(recorded)


@pytest.mark.parametrize("name", ["resnet50", "unet", "bert", "gpt2", "vit"])
def test_mixtures_are_composed_to_a_scalar(name: str) -> None:
    setting = Setting(name)
    recordings, draw = setting.recordings(), random.Random(0)
    uniform = [dict.fromkeys(setting.blocks, policy) for policy in POLICIES[1:]]
    drawn = [{block: draw.choice(POLICIES) for block in setting.blocks} for _ in range(3)]
    for choice in ({}, *uniform, *drawn):
        named = {block: policy for block, policy in choice.items() if policy != KEEP}
        size = draw.choice([1, 4, 7])
        whole = trace(setting.plan(2 * size, size, named), setting.task, setting.batch)
        mixture = recordings.mixture(2 * size, size, find_device("cpu"), half=False, input_bytes=0)
        composed = mixture.peak(named)
        assert abs(composed - whole.peak) <= 0.005 * whole.peak, (size, named)


def test_what_is_moved_takes_as_long_as_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is longer than computing; a short one is hidden behind it."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    setting, card = Setting("gpt2"), find_device("cuda:a100")
    recordings = setting.recordings((KEEP, "offload"), "cuda")
    moved = dict.fromkeys(setting.blocks, "offload")
    fast, slow = [
        recordings.mixture(12, 4, replace(card, link=link), half=False, input_bytes=0) for link in (1e15, 1e6)
    ]
    times = {0: 1, 1: 2}  # the second micro-batch stands for the third, too
    copied = (
        sum(times[one.place[1]] * abs(size) for one in slow.of(moved) for size in one.others.values()) / 1e6
    )
    assert 0 < copied <= slow.seconds(moved) <= copied + fast.seconds(moved)
    assert fast.seconds(moved) < copied / 100


@pytest.mark.parametrize("name", ["resnet50", "unet", "t5", "vit"])
def test_what_is_moved_is_composed_whatever_becomes_of_its_neighbours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    setting, draw = Setting(name), random.Random(0)
    policies = (*POLICIES, "offload")
    recordings, size = setting.recordings(policies, "cuda"), 7
    some = [["offload", KEEP], [KEEP, "offload"], [KEEP, KEEP, "offload", "offload"], ["offload"]]
    patterns = [list(itertools.islice(itertools.cycle(one), len(setting.blocks))) for one in some]
    patterns += [[draw.choice(policies) for _ in setting.blocks] for _ in range(3)]
    for pattern in patterns:
        choice = {
            block: policy for block, policy in zip(setting.blocks, pattern, strict=True) if policy != KEEP
        }
        exact = setting.recording(2 * size, size, choice, "cuda").peak()
        mixture = recordings.mixture(2 * size, size, find_device("cuda:a100"), half=False, input_bytes=0)
        over = mixture.peak(choice) - exact
        assert over >= -0.005 * exact, pattern
        # A neighbour that runs again may do so before anything has come back.
        assert over <= (0.05 if {"recompute", "selective"} & {*pattern} else 0.005) * exact, pattern


def test_what_many_blocks_read_is_held_by_those_that_run_again() -> None:
    """T5's first layer hands its position bias to all others; only a rebuilt one keeps it as an argument."""
    setting = Setting("t5")
    recordings = setting.recordings()
    for block in ("encoder.block.1", "decoder.block.1"):
        exact = setting.recording(12, 6, {block: "recompute"}).peak()
        mixture = recordings.mixture(12, 6, find_device("cpu"), half=False, input_bytes=0)
        assert abs(mixture.peak({block: "recompute"}) - exact) <= 0.0005 * exact


def test_uncut_batch_has_no_second_micro_batch() -> None:
    setting = Setting("gpt2")
    mixture = setting.recordings().mixture(4, 4, find_device("cpu"), half=False, input_bytes=0)
    whole = trace(Plan(rows=4, micro_batch=4), setting.task, setting.batch)
    assert abs(mixture.peak({}) - whole.peak) <= 0.005 * whole.peak


def test_seconds_grow_with_what_is_rebuilt() -> None:
    setting = Setting("gpt2")
    mixture = setting.recordings().mixture(8, 2, find_device("cpu"), half=False, input_bytes=0)
    kept, rebuilt = mixture.seconds({}), mixture.seconds(dict.fromkeys(setting.blocks, "recompute"))
    assert kept < rebuilt < 2 * kept
    assert kept < mixture.seconds(dict.fromkeys(setting.blocks, "selective")) < 2 * kept


def test_a_loss_that_does_more_at_some_sizes_leaves_the_blocks_in_line() -> None:
    """Event by event, for the highest moment of a block is another one where there are many rows."""

    def fit(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Total:
        losses = (model(micro[0]) - micro[1]).square().sum(1)
        for _ in range(len(losses) % 2):
            losses = losses.clone().clone()
        return Total(losses.sum(), len(losses))

    class Changing(nn.Linear):
        """Few rows need less for a moment than its weight, many need more."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clone()
                x.repeat(1, 16)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(64, 64), Changing(64, 64))
    step = Step(model, fit, torch.optim.SGD(model.parameters(), lr=0.1), check=False)
    task, batch = step.task(), TensorBatch((torch.zeros(512, 64), torch.zeros(512, 64)))
    one, other = [trace(Plan(rows=2 * size, micro_batch=size), task, batch).recording for size in SIZES]
    recorded = Recorded(sizes=SIZES, recordings=(one, other), blocks=("0", "1"))
    assert not recorded.is_aligned
    beyond = -512 * (64 + 64) * 4  # the recordings are of two micro-batches
    mixture = PolicyRecordings({KEEP: recorded}).mixture(
        512, 512, find_device("cpu"), half=False, input_bytes=beyond
    )
    whole = trace(Plan(rows=512, micro_batch=512), task, batch)
    assert abs(mixture.peak({}) - whole.peak) <= 0.005 * whole.peak
