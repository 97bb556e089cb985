"""Memory runs out: where no smaller cut will do, and what is learned of it; `laws/drawn.py` has the law."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Options, Step, StepReport, Total
from anybatch.core.errors import OutOfMemoryError
from tests.device import needs_cpu
from tests.faults.faulty import CLASSES, FEATURES, ROWS, build, make_batch, scarce_in_passes, windowed
from tests.snapshots import assert_same, same_as_before, snapshot


def bare(model: nn.Module, micro: Any) -> Total:
    return Total(F.cross_entropy(model(micro[0]), micro[1]), 1)


def whole_only(batch_norm: str | None = None, micro_batch: int | None = None, loss: Any = None) -> Step:
    """A step whose result depends on the cut: by BatchNorm, or by a loss that does not add up."""
    torch.manual_seed(0)
    norm = nn.Identity() if loss else nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(FEATURES + 1, 5), norm, nn.Linear(5, CLASSES))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss or nn.CrossEntropyLoss()
    return Step(model, loss, optimizer, options=Options(batch_norm=batch_norm), micro_batch=micro_batch)


def at_once(step: Step) -> StepReport:
    return step(make_batch())


def in_window(step: Step) -> StepReport:
    return windowed(step, make_batch(), ROWS)


def test_one_row_that_does_not_fit_is_an_error_and_nothing_is_changed() -> None:
    step = build("counting")
    error = pytest.raises(OutOfMemoryError, match="one row is the least")
    with same_as_before(step), scarce_in_passes(set(range(10**4))) as memory, error:
        at_once(step)
    assert memory.refused == 4  # 4, 2, 1, and 1 once more


# Between two tries a few rows are looked at, in a number of passes that depends on the device.
FOR_EVERY = pytest.param(bare, {2, 150}, "for every split", marks=needs_cpu)


@pytest.mark.parametrize(("loss", "refused", "said"), [(None, {2, 3}, r"BatchNorm \(1\) takes"), FOR_EVERY])
def test_where_rows_meet_no_smaller_cut_is_chosen(loss: Any, refused: set[int], said: str) -> None:
    step = whole_only(loss=loss)
    with same_as_before(step), scarce_in_passes(refused), pytest.raises(OutOfMemoryError, match=said):
        at_once(step)


MICRO = {"batch_norm": "micro"}
ACTS = [(one, at_once) for one in ({}, MICRO, MICRO | {"micro_batch": 4}, {"loss": bare})]


@pytest.mark.parametrize(("options", "act"), [*ACTS, ({}, in_window), (MICRO, in_window)])
def test_a_size_that_may_not_be_cut_is_tried_again_and_not_learned(options: Any, act: Any) -> None:
    step, twin = whole_only(**options), whole_only(**options)
    with scarce_in_passes({2}):
        report = act(step)
    assert (report.redone, report.too_large) == (1, 0)
    assert report.cut == act(twin).cut
    assert act(step) == act(twin)
    assert_same(snapshot(twin), snapshot(step))


@pytest.mark.parametrize("batch_norm", [None, "micro", "frozen"])
def test_what_was_learned_does_not_hold_where_the_cut_matters(batch_norm: str | None) -> None:
    step = whole_only(batch_norm)
    step.model.train(batch_norm == "frozen")
    with scarce_in_passes({2}):
        assert at_once(step).too_large == ROWS
    assert at_once(step).cut == (8, 8)
    step.model.train()
    cut = (8, 8) if batch_norm == "frozen" else (ROWS,)
    assert at_once(step).cut == in_window(step).cut == cut


def test_a_lasting_lack_of_memory_is_learned_once() -> None:
    step = build("plain", micro_batch=8)
    with scarce_in_passes(most=850) as memory:
        reports = [at_once(step) for _ in range(4)]
    assert memory.refused
    assert [report.redone > 0 for report in reports] == [True, False, False, False]
    assert max(reports[1].cut) < 8
    assert step.plan(ROWS).micro_batch == 8  # other rows
