"""Windows used out of order, interrupted or fed bad input: nothing is lost that need not be."""

import math
from typing import Any

import pytest
import torch

from anybatch.core.errors import BatchError, NonFiniteLossError, WindowError
from tests.snapshots import changes, make_batch, snapshot
from tests.trips import MODES, Trip, assert_same_step, build, step_once


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("failing", ["refused", "forward"])
def test_window_survives_a_micro_batch_that_is_refused_or_fails_in_its_forward(
    mode: str, position: int, failing: str
) -> None:
    trip = Trip()
    step, twin = build(trip, **MODES[mode]), build(Trip(), **MODES[mode])
    good = [make_batch(seed=seed, rows=seed) for seed in (3, 5)]
    torch.manual_seed(5)
    window = step.window()
    for index in range(3):
        if index == position:
            bad: Any = make_batch(seed=9)
            if failing == "refused":
                bad = bad[0], bad[1][:3]
            else:
                trip.arm("forward")
            with pytest.raises((BatchError, RuntimeError)):
                window.add(bad)
        if index < 2:
            window.add(good[index])
    assert window.rows == 8
    report = window.close()
    torch.manual_seed(5)
    other = twin.window()
    for micro in good:
        other.add(micro)
    assert report == other.close()
    assert changes(snapshot(twin), snapshot(step)) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_window_that_cannot_be_closed_is_discarded(mode: str, bad: float) -> None:
    step, twin = build(Trip(), **MODES[mode]), build(Trip(), **MODES[mode])
    before = snapshot(step)
    window = step.window()
    window.add(make_batch())
    window.add((make_batch()[0] * bad, make_batch()[1]))
    with pytest.raises(NonFiniteLossError, match=r"in micro-batches \[1\] of 2 .* rows 8 to 15"):
        window.close()
    assert changes(before, snapshot(step)) == []
    assert step.open_window is None
    assert_same_step(step, twin)


def test_window_closed_empty_may_still_be_filled() -> None:
    step, twin = build(Trip()), build(Trip())
    before = snapshot(step)
    window = step.window()
    for end in (window.close, window.update):
        with pytest.raises(
            WindowError, match=r"at least one micro-batch in the window, got 0 rows\. Call add"
        ):
            end()
    torch.manual_seed(5)
    window.add(make_batch())
    window.close()
    torch.manual_seed(5)
    step_once(twin, by_window=True)
    assert changes(snapshot(twin), snapshot(step)) == []
    assert changes(before, snapshot(step)) != []


def test_window_over_takes_nothing_more() -> None:
    step = build(Trip())
    window = step.window()
    window.add(make_batch())
    with pytest.raises(WindowError, match="Expected a window that is updated to clear, got one that is open"):
        window.clear()
    window.update()
    for use in (lambda: window.add(make_batch()), window.update, window.close):
        with pytest.raises(WindowError, match=r"got one that is updated\. Open a new"):
            use()
    window.clear()
    before = snapshot(step)
    for use in (lambda: window.add(make_batch()), window.update, window.clear, window.close):
        with pytest.raises(WindowError, match=r"got one that is closed\. Open a new"):
            use()
    window.discard()  # may be said twice
    assert changes(before, snapshot(step)) == []


@pytest.mark.parametrize("rows", [0, 8])
def test_window_left_open_is_named_and_can_be_ended(rows: int) -> None:
    step, twin = build(Trip()), build(Trip())
    found = snapshot(step)
    if rows:
        step.window().add(make_batch())  # and the caller's own name for it is gone
    else:
        step.window()
    before = snapshot(step)
    for use in (lambda: step(make_batch()), step.window):
        with pytest.raises(
            WindowError, match=f"Expected no open window, got one with {rows} rows. Call close"
        ):
            use()
    assert changes(before, snapshot(step)) == []
    assert step.open_window is not None
    step.open_window.discard()
    assert changes(found, snapshot(step)) == []
    assert_same_step(step, twin)


@pytest.mark.parametrize("by_phases", [False, True])
def test_window_as_a_context_manager_is_closed_at_its_end(by_phases: bool) -> None:
    step, twin = build(Trip()), build(Trip())
    torch.manual_seed(5)
    with step.window() as window:
        window.add(make_batch())
        if by_phases:
            window.update()
            assert step.model.second[0].weight.grad is not None  # type: ignore[union-attr, index]
    torch.manual_seed(5)
    step_once(twin, by_window=True)
    assert changes(snapshot(twin), snapshot(step)) == []
    assert step.open_window is None


def test_window_as_a_context_manager_is_discarded_by_an_error() -> None:
    step = build(Trip())
    before = snapshot(step)

    def interrupted() -> None:
        with step.window() as window:
            window.add(make_batch())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert changes(before, snapshot(step)) == []
    with pytest.raises(WindowError, match="at least one micro-batch"), step.window():
        pass
    assert changes(before, snapshot(step)) == []
    assert step.open_window is None


def test_windows_in_a_row_are_steps_in_a_row() -> None:
    step, twin = build(Trip(), micro_batch=None), build(Trip(), micro_batch=None)
    for seed in (1, 2):
        for one, go in ((step, step_once), (twin, lambda it, _: it(make_batch()))):
            torch.manual_seed(seed)
            go(one, True)
        assert step.open_window is None
    steps = [s.schedulers[0].last_epoch for s in (step, twin)]
    assert steps == [3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_a_window_cannot_be_cleared(mode: str) -> None:
    step, twin = build(Trip(), **MODES[mode]), build(Trip(), **MODES[mode])
    for one in (step, twin):
        torch.manual_seed(5)
        window = one.window()
        for seed in range(2):
            window.add(make_batch(seed))
            if one is step:
                step.optimizers[0].zero_grad()
        window.close()
    assert changes(snapshot(twin), snapshot(step)) == []
