"""After memory ran out: what is learned of it, which random streams come back, what is not done twice."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Step, StepReport, Total
from anybatch.core.errors import BudgetError
from anybatch.state.snapshot import EVERY, FIRST
from tests.faults.scarce import scarce_in_passes
from tests.faults.starved import CLASSES, FEATURES, assert_same_as_the_same_cut, batch_for, make, seed, sgd
from tests.snapshots import changes, snapshot

# ---- what is learned


def bare(model: nn.Module, micro: Any) -> Total:
    return Total(F.cross_entropy(model(micro[0]), micro[1]), 1)


def not_additive() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))
    return Step(model, bare, sgd(model))


def with_norm(batch_norm: str | None, micro_batch: int | None = None) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    return Step(model, nn.CrossEntropyLoss(), sgd(model), batch_norm=batch_norm, micro_batch=micro_batch)


def at_once(step: Step) -> StepReport:
    return step(batch_for("early"))


def in_window(step: Step) -> StepReport:
    with step.window() as window:
        window.add(batch_for("early"))
        return window.close()


@pytest.mark.parametrize(
    ("make_step", "take"),
    [
        (lambda: with_norm(None), at_once),
        (lambda: with_norm("micro"), at_once),
        (lambda: with_norm("micro", 4), at_once),
        (not_additive, at_once),
        (lambda: with_norm(None), in_window),
        (lambda: with_norm("micro"), in_window),
    ],
    ids=["refused", "micro", "micro, cut", "does not add up", "refused in a window", "micro in a window"],
)
def test_a_size_that_may_not_be_cut_is_not_learned(
    make_step: Callable[[], Step], take: Callable[[Step], StepReport]
) -> None:
    step, twin = make_step(), make_step()
    with scarce_in_passes({2}):
        mended = take(step)
    assert (mended.redone, mended.too_large) == (1, 0)
    assert mended.cut == take(twin).cut
    assert take(step) == take(twin)
    assert changes(snapshot(twin), snapshot(step)) == []


def test_a_size_that_may_be_cut_is_learned() -> None:
    step = with_norm("frozen")
    with scarce_in_passes({2}):
        assert at_once(step).too_large == 16
    assert at_once(step).cut == (8, 8)


@pytest.mark.parametrize("batch_norm", [None, "micro"])
def test_what_was_learned_does_not_hold_where_the_cut_matters(batch_norm: str | None) -> None:
    step = with_norm(batch_norm)
    step.model.eval()
    with scarce_in_passes({2}):
        at_once(step)
    assert at_once(step).cut == (8, 8)
    step.model.train()
    assert at_once(step).cut == (16,)
    assert in_window(step).cut == (16,)


# ---- random streams


class Drawing(nn.Module):
    """Its forward draws a number from a stream that is not torch's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.kind = kind
        self.torch = torch.Generator().manual_seed(0)
        self.numpy = np.random.default_rng(0)
        self.state = np.random.RandomState(0)
        self.python = random.Random(0)

    def draw(self) -> float:
        draws: dict[str, Callable[[], float]] = {
            "nothing": lambda: 0.5,
            "torch": lambda: torch.rand(()).item(),
            "Python": random.random,
            "NumPy": np.random.rand,
            "a generator of torch": lambda: torch.rand((), generator=self.torch).item(),
            "a generator of NumPy": self.numpy.random,
            "a state of NumPy": self.state.rand,
            "a generator of Python": self.python.random,
        }
        return draws[self.kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)) * (1 + self.draw()))


KINDS = [
    "torch",
    "Python",
    "NumPy",
    "a generator of torch",
    "a generator of NumPy",
    "a state of NumPy",
    "a generator of Python",
]


def drawing(kind: str) -> Step:
    torch.manual_seed(0)
    model = Drawing(kind)
    return Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=4)


def seed_all() -> None:
    seed()
    np.random.seed(3)


def assert_mended(step: Step, twin: Step, at: int) -> None:
    seed_all()
    with scarce_in_passes({at}):
        report = at_once(step)
    assert report.redone == 1
    np.random.seed(3)
    assert_same_as_the_same_cut(step, report, twin, batch_for("early"))


def late_allocation(step: Step) -> int:
    """One in the backward of the second micro-batch."""
    with scarce_in_passes() as counted:
        at_once(copy.deepcopy(step))
    return counted.count // 2 - 2


@pytest.mark.parametrize("steps", [0, FIRST, EVERY + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stream_that_a_forward_draws_from_comes_back(kind: str, steps: int) -> None:
    step, twin = drawing(kind), drawing(kind)
    at = late_allocation(drawing("nothing"))
    for one in (step, twin):
        seed_all()
        for _ in range(steps):
            at_once(one)
    assert_mended(step, twin, at)


def test_a_forward_that_begins_to_draw_later_is_seen() -> None:
    step, twin = drawing("nothing"), drawing("nothing")
    at = late_allocation(step)
    for one in (step, twin):
        seed_all()
        for number in range(EVERY + 1):
            one.model.kind = "Python" if number > FIRST else "nothing"
            at_once(one)
    assert_mended(step, twin, at)


def test_where_torchs_stream_was_not_noted_and_has_moved_the_step_begins_again() -> None:
    step, twin = drawing("nothing"), drawing("nothing")
    at = late_allocation(step)
    for one in (step, twin):
        seed_all()
        for _ in range(FIRST):
            at_once(one)
        one.model.kind = "torch"
        assert not one.effects.draws
    assert_mended(step, twin, at)
    assert step.effects.draws


def test_a_collated_micro_batch_of_a_window_comes_back() -> None:
    step, twin = make("collated"), make("collated")
    batch = batch_for("collated", 4)
    for one in (step, twin):
        seed()
        for _ in range(FIRST):
            one(batch)
    seed()
    with step.window() as window, scarce_in_passes({1}):
        window.add(batch)
        cut = window.close().cut
    assert cut == (2, 2)
    seed()
    with twin.window() as window:
        for start in (0, 2):
            window.add(batch[start : start + 2])
        window.close()
    assert changes(snapshot(twin), snapshot(step)) == []


# ---- the update, and what comes after


def test_a_scheduler_without_memory_leaves_a_whole_update() -> None:
    class Greedy(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            if self.last_epoch >= 0:
                raise MemoryError("no room for a rate")
            super().step(epoch)

    step, twin = make("early"), make("early")
    vars(step).update(schedulers=(Greedy(step.optimizers[0], lambda epoch: 1.0),))
    with pytest.raises(MemoryError, match="no room for a rate"):
        at_once(step)
    at_once(twin)
    named = [*zip(step.model.parameters(), twin.model.parameters(), strict=True)]
    assert all(torch.equal(one, other) for one, other in named)


def test_a_micro_batch_for_which_there_is_no_plan_leaves_the_window_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, twin = make("early", dropout=0.5), make("early", dropout=0.5)
    seed()
    with step.window() as window:
        window.add(batch_for("early"))
        monkeypatch.setattr(type(step.planning), "of_window", no_plan)
        with pytest.raises(BudgetError):
            window.add(batch_for("early"))
        monkeypatch.undo()
        assert window.rows == 16
        window.close()
    seed()
    in_window(twin)
    assert changes(snapshot(twin), snapshot(step)) == []


def no_plan(*_: Any) -> None:
    raise BudgetError("Expected a budget that one row fits, got 1 B. Allow more.")
