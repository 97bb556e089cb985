"""Memory runs out, anywhere: every update is, bit for bit, that of the same cut without the fault."""

import copy
import json
import os
import random
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from anybatch.engine.course import Course
from anybatch.engine.run import Run
from torch import Tensor, nn

from anybatch import Step, Total, WholeBatch
from anybatch.core.errors import OutOfMemoryError
from anybatch.core.report import Event, MicroBatchDone, MicroBatchRedone
from anybatch.engine import admit, course
from anybatch.engine.gradients import Gradients
from anybatch.state.snapshot import Surroundings
from tests.faults.scarce import scarce
from tests.faults.starved import (
    CLASSES,
    FEATURES,
    OPTIONS,
    ROWS,
    Net,
    assert_same_as_the_same_cut,
    batch_for,
    carried_out,
    groups,
    make,
    seed,
    sgd,
)
from tests.snapshots import changes, snapshot

FEW = 30  # that are not slow


@pytest.mark.parametrize(
    "number", [*range(FEW), *[pytest.param(one, marks=pytest.mark.slow) for one in range(FEW, 240)]]
)
def test_a_fault_at_any_allocation_changes_no_update(number: int) -> None:
    draw = random.Random(number)
    name = draw.choice([*OPTIONS])
    options = {
        "dropout": draw.choice([0.0, 0.5]),
        "micro_batch": draw.choice([None, 3, 4, 5, 8]),
        "optimizer": draw.choice([sgd, groups]),
    }
    step, twin, batch = make(name, **options), make(name, **options), batch_for(name)
    with scarce(Run, "add") as counted:
        carried_out(make(name, **options), step.plan(ROWS), batch)
    refuse = {draw.randrange(counted.count) for _ in range(draw.choice([1, 1, 2, 3]))}
    seed()
    before = snapshot(step)
    with scarce(Run, "add", refuse, saying=draw.randrange(3)) as memory:
        try:
            report = step(batch)
        except OutOfMemoryError:  # one row, tried twice
            assert memory.refused > 1
            assert changes(before, snapshot(step)) == []
            return
    assert memory.refused >= report.redone >= 1
    assert_same_as_the_same_cut(step, report, twin, batch)


# ---- where it runs out, and what comes again


class Diary:
    """Rows of micro-batches that are done, and those that came again, as negative numbers."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, MicroBatchDone):
            self.rows.append(event.rows)
        if isinstance(event, MicroBatchRedone):
            assert event.index == sum(rows > 0 for rows in self.rows)
            assert "memory" in event.reason.lower()
            self.rows.append(-event.rows)


class Fail(torch.autograd.Function):
    """The identity, whose backward fails when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: list[str]) -> Tensor:
        ctx.places = places
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if "backward" in ctx.places:
            ctx.places.remove("backward")
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradients[0], None


class Failing(Net):
    """Fails in the forward or half-way through the backward of its second micro-batch."""

    def __init__(self, dropout: float, places: list[str]) -> None:
        super().__init__(dropout)
        self.places, self.calls = places, 0
        self.held: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](Fail.apply(self.enter(x[:, None]).flatten(1), []))
        self.calls += 1
        self.seen += 1
        if self.calls > 1:
            if "forward" in self.places:
                self.places.remove("forward")
                self.held.append(weakref.ref(hidden))
                raise torch.OutOfMemoryError("CUDA out of memory.")
            hidden = Fail.apply(hidden, self.places)
        return self.leave(hidden)


@pytest.mark.parametrize(
    ("places", "heard"),
    [
        (["forward"], [4, -4, 2, 2, 2, 2, 2, 2]),
        (["backward"], [4, -4, 4, 2, 2, 2, 2]),  # its cut stays, because the last layer holds all of it
        (["backward", "backward"], [4, -4, *[2] * 8]),
    ],
    ids=["forward", "backward", "backward twice"],
)
@pytest.mark.parametrize("options", [{}, {"accumulate": torch.float64}, {"compensated": True}], ids=str)
def test_only_the_micro_batch_in_which_memory_runs_out_comes_again(
    places: list[str], heard: list[int], options: dict[str, Any]
) -> None:
    diary, made = Diary(), []
    for where in (list(places), []):
        torch.manual_seed(0)
        model = Failing(0.5, where)
        made.append(Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=4, **options))
    step, twin = made
    step.listeners = (diary,)
    seed()
    report = step(batch_for("early"))
    again = heard if len(places) < 2 else [4, -4, *[2] * 8]
    assert diary.rows == again
    assert (report.redone, report.too_large) == (1, 4)
    assert_same_as_the_same_cut(step, report, twin, batch_for("early"))
    assert all(held() is None for held in step.model.held)  # type: ignore[union-attr]


def all_parameters(self: Gradients) -> list[nn.Parameter]:
    return [*self._parameters]


def forget_the_earlier(self: Course, start: int, rows: int) -> None:
    cut(self, start, rows)
    for parameter in self.task.parameters:
        parameter.grad = None


cut = Course._cut

#: What is done wrong, and where memory runs out so that it shows.
MISTAKES: dict[str, tuple[type, str, Any, str]] = {
    "earlier gradients dropped": (Course, "_cut", forget_the_earlier, "forward"),
    "accepted twice": (Gradients, "_missing", all_parameters, "backward"),
    "stale random state": (Surroundings, "put_back", Surroundings.put_buffers_back, "forward"),
    "buffers not put back": (Surroundings, "put_buffers_back", lambda self: None, "forward"),
}


def test_blocks_that_cannot_run_again_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "find_blocks", lambda model: ("no such block",))
    test_only_the_micro_batch_in_which_memory_runs_out_comes_again(["backward"], [4, -4, 4, 2, 2, 2, 2], {})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_breaks_the_law(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, place = MISTAKES[mistake]
    heard = {"forward": [4, -4, 2, 2, 2, 2, 2, 2], "backward": [4, -4, 4, 2, 2, 2, 2]}[place]
    law = test_only_the_micro_batch_in_which_memory_runs_out_comes_again
    law([place], heard, {})
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        law([place], heard, {})


@pytest.mark.parametrize("saying", range(3))
def test_a_first_pass_comes_again_in_halves(saying: int) -> None:
    step, twin = (make("whole batch", dropout=0.5) for _ in range(2))
    seed()
    with scarce(WholeBatch, "_first_pass", {20}, saying=saying):
        report = step(batch_for("whole batch"))
    assert report.cut == (2,) * 8
    assert_same_as_the_same_cut(step, report, twin, batch_for("whole batch"))


def test_one_row_that_does_not_fit_is_an_error_and_nothing_is_changed() -> None:
    step = make("early", dropout=0.5)
    before = snapshot(step)
    with scarce(Run, "add", set(range(10**4))) as memory, pytest.raises(OutOfMemoryError) as caught:
        step(batch_for("early"))
    assert "1 rows" in str(caught.value)
    assert "one row is the least" in str(caught.value)
    assert memory.refused == 4  # 4, 2, 1, and 1 recomputed
    assert changes(before, snapshot(step)) == []
    caught.value.ledger = "parameters 1 GiB"
    assert str(caught.value).endswith("\nparameters 1 GiB")


def test_where_rows_meet_no_smaller_cut_is_chosen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    step = Step(model, nn.CrossEntropyLoss(), sgd(model))
    before = snapshot(step)
    with scarce(Run, "add", {2, 3}), pytest.raises(OutOfMemoryError, match=r"BatchNorm \(1\) takes"):
        step(batch_for("early"))
    assert changes(before, snapshot(step)) == []
    twin = copy.deepcopy(step)
    with scarce(Run, "add", {2}):
        report = step(batch_for("early"))  # fits at the second try
    assert report.cut == (ROWS,)
    twin(batch_for("early"))
    assert changes(snapshot(twin), snapshot(step)) == []


def test_a_loss_that_does_not_add_up_is_not_cut() -> None:
    def bare(model: nn.Module, micro: Any) -> Total:
        return Total(F.cross_entropy(model(micro[0]), micro[1]), 1)

    torch.manual_seed(0)
    model = Net()
    step = Step(model, bare, sgd(model))
    before = snapshot(step)
    with scarce(Run, "add", {2, 3}), pytest.raises(OutOfMemoryError, match="to add up"):
        step(batch_for("early"))
    assert changes(before, snapshot(step)) == []


def test_what_is_not_lack_of_memory_is_raised_as_it_is() -> None:
    step = make("early")
    with pytest.raises(RuntimeError, match="shape"):
        step((torch.ones(8, FEATURES + 1), torch.zeros(8, dtype=torch.int64)))


# ---- the update


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_optimizer_whose_state_fits_at_the_second_try_updates_once(at: int) -> None:
    step, twin = make("early", optimizer=groups), make("early", optimizer=groups)
    with scarce(torch.optim.AdamW, "step", {at}) as memory:
        step(batch_for("early"))
    assert memory.refused == 1
    twin(batch_for("early"))
    assert changes(snapshot(twin), snapshot(step)) == []


def test_an_optimizer_whose_state_does_not_fit_changes_nothing() -> None:
    step = make("early", optimizer=groups)
    before = snapshot(step)
    with (
        scarce(torch.optim.AdamW, "step", set(range(1000))),
        pytest.raises(OutOfMemoryError, match="No update was made"),
    ):
        step(batch_for("early"))
    assert changes(before, snapshot(step)) == []


def test_an_update_that_is_torn_says_so() -> None:
    step = make("early", optimizer=groups)
    step(batch_for("early"))
    with scarce(torch.optim.AdamW, "step") as counted:
        step(batch_for("early"))
    with (
        scarce(torch.optim.AdamW, "step", {counted.count - 1}),
        pytest.raises(OutOfMemoryError, match="cannot be undone"),
    ):
        step(batch_for("early"))


# ---- windows, limits


@pytest.mark.parametrize("name", ["early", "several terms", "model's own", "float64 sums"])
@pytest.mark.parametrize("at", [3, 60])
def test_a_window_survives(name: str, at: int) -> None:
    step, twin = make(name, dropout=0.5), make(name, dropout=0.5)
    seed()
    with scarce(Run, "add", {at}), step.window() as window:
        window.add(batch_for(name, 8))
        window.add(batch_for(name, 5))
        report = window.close()
    assert report.redone == 1
    seed()
    with twin.window() as window:
        for rows in report.cut:
            window.add(part(name, rows, window.rows))
        other = window.close()
    assert changes(snapshot(twin), snapshot(step)) == []
    assert other.cut == report.cut


def part(name: str, size: int, start: int) -> Any:
    batches = [batch_for(name, 8), batch_for(name, 5)]
    nests = [one if isinstance(one, dict) else dict(enumerate(one)) for one in batches]
    whole = {key: torch.cat([nest[key] for nest in nests]) for key in nests[0]}
    cut = {key: value[start : start + size] for key, value in whole.items()}
    return cut if isinstance(batches[0], dict) else tuple(cut.values())


def test_a_lasting_lack_of_memory_is_learned_once() -> None:
    step = make("early", micro_batch=8)
    reports = []
    with scarce(Run, "add", most=3000) as memory:
        for _ in range(4):
            reports.append(step(batch_for("early")))
    assert memory.refused
    assert reports[0].redone
    assert [report.redone for report in reports[1:]] == [0, 0, 0]
    assert max(reports[1].cut) < 8
    like = admit(batch_for("early"), step.task(), None).like
    assert step.planning.limits.known[like].fits == max(reports[1].cut)
    assert step.plan(ROWS).micro_batch == 8  # other rows


# ---- a real limit


def confined(spare_bytes: int, cut: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.faults.confined", str(spare_bytes), cut]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("spare_bytes", [150 << 20, 100 << 20, 60 << 20])
def test_under_a_limit_of_the_system_a_step_is_that_of_the_same_cut(spare_bytes: int) -> None:
    found = confined(spare_bytes, "none")
    if spare_bytes <= 100 << 20:
        assert found["redone"]
    other = confined(0, ",".join(map(str, found["cut"])))
    assert other["digest"] == found["digest"]
    assert other["cut"] == found["cut"]
