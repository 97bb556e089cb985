"""Memory runs out, anywhere: every update is, bit for bit, that of the same cut without the fault."""

import copy
import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Step, Total
from anybatch.core.errors import OutOfMemoryError
from anybatch.engine import admit
from tests.faults.scarce import scarce, scarce_in_passes
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
    with scarce_in_passes() as counted:
        carried_out(make(name, **options), step.plan(ROWS), batch)
    refuse = {draw.randrange(counted.count) for _ in range(draw.choice([1, 1, 2, 3]))}
    seed()
    before = snapshot(step)
    with scarce_in_passes(refuse, saying=draw.randrange(3)) as memory:
        try:
            report = step(batch)
        except OutOfMemoryError:  # one row, tried twice
            assert memory.refused > 1
            assert changes(before, snapshot(step)) == []
            return
    assert memory.refused >= report.redone >= 1
    assert_same_as_the_same_cut(step, report, twin, batch)


# ---- where no smaller cut will do


def test_one_row_that_does_not_fit_is_an_error_and_nothing_is_changed() -> None:
    step = make("early", dropout=0.5)
    before = snapshot(step)
    with scarce_in_passes(set(range(10**4))) as memory, pytest.raises(OutOfMemoryError) as caught:
        step(batch_for("early"))
    assert "1 rows" in str(caught.value)
    assert "one row is the least" in str(caught.value)
    assert memory.refused == 4  # 4, 2, 1, and 1 once more
    assert changes(before, snapshot(step)) == []
    caught.value.ledger = "parameters 1 GiB"
    assert str(caught.value).endswith("\nparameters 1 GiB")


def test_where_rows_meet_no_smaller_cut_is_chosen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    step = Step(model, nn.CrossEntropyLoss(), sgd(model))
    before = snapshot(step)
    with scarce_in_passes({2, 3}), pytest.raises(OutOfMemoryError, match=r"BatchNorm \(1\) takes"):
        step(batch_for("early"))
    assert changes(before, snapshot(step)) == []
    twin = copy.deepcopy(step)
    with scarce_in_passes({2}):
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
    with scarce_in_passes({2, 3}), pytest.raises(OutOfMemoryError, match="to add up"):
        step(batch_for("early"))
    assert changes(before, snapshot(step)) == []


# ---- the update


def test_an_optimizer_whose_state_does_not_fit_changes_nothing() -> None:
    step = make("early", optimizer=groups)
    before = snapshot(step)
    with (
        scarce(torch.optim.AdamW, "step", set(range(1000))),
        pytest.raises(OutOfMemoryError, match="No update was made"),
    ):
        step(batch_for("early"))
    assert changes(before, snapshot(step)) == []


# ---- windows, limits


@pytest.mark.parametrize("name", ["early", "several terms", "model's own", "float64 sums"])
@pytest.mark.parametrize("at", [3, 60])
def test_a_window_survives(name: str, at: int) -> None:
    step, twin = make(name, dropout=0.5), make(name, dropout=0.5)
    seed()
    with scarce_in_passes({at}), step.window() as window:
        window.add(batch_for(name, 8))
        window.add(batch_for(name, 5))
        report = window.close()
    assert report.redone == 1
    assert report.cut == (4, 4, 4, 1)
    learned = twin.planning.limits
    for rows in (8, 5):  # the same cut: each `add` is summed before it is merged into the window
        learned.learn(admit(batch_for(name, rows), twin.task(), None).like, rows, largest=4, failed=8)
    seed()
    with twin.window() as window:
        window.add(batch_for(name, 8))
        window.add(batch_for(name, 5))
        other = window.close()
    assert changes(snapshot(twin), snapshot(step)) == []
    assert (other.cut, other.redone) == (report.cut, 0)


def test_a_lasting_lack_of_memory_is_learned_once() -> None:
    step = make("early", micro_batch=8)
    reports = []
    with scarce_in_passes(most=3000) as memory:
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
