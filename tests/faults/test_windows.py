"""Windows used out of order, interrupted, or left open: nothing is lost that need not be."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from anybatch.core.errors import WindowError
from tests.faults.faulty import BEGIN, ROWS, build, make_batch, seed, take, windowed
from tests.snapshots import assert_same, same_as_before, snapshot


def refused(uses: list[Callable[[], Any]], said: str) -> None:
    for use in uses:
        with pytest.raises(WindowError, match=said):
            use()


def test_a_window_that_is_over_takes_nothing_more() -> None:
    step = build()
    window = step.window()
    window.add(make_batch())
    refused([window.clear], "that is updated to clear, got one that is open")
    window.update()
    add = lambda: window.add(make_batch())  # noqa: E731
    refused([add, window.update, window.close], r"got one that is updated\. Open a new")
    window.clear()
    with same_as_before(step):
        refused([add, window.update, window.clear, window.close], r"got one that is closed\. Open a new")
        window.discard()  # may be said twice


@pytest.mark.parametrize("rows", [0, ROWS])
def test_a_window_left_open_is_named_and_can_be_ended(rows: int) -> None:
    step = build("counting")
    with same_as_before(step):
        window = step.window()
        if rows:
            window.add(make_batch())
        del window  # the caller's own name for it is gone
        with same_as_before(step):
            refused([lambda: step(make_batch()), step.window], f"no open window, got one with {rows} rows")
        assert step.open_window is not None
        step.open_window.discard()
    assert take(step, "step", make_batch()).updated


def test_a_window_as_a_context_manager_is_closed_at_its_end_and_discarded_by_an_error() -> None:
    step, twin = build("counting"), build("counting")
    with step.window() as window:
        window.add(make_batch())
    seed(BEGIN)
    windowed(twin, make_batch(), ROWS)
    assert_same(snapshot(twin), snapshot(step))
    with same_as_before(step):
        with suppress(KeyboardInterrupt), step.window() as window:
            window.add(make_batch())
            raise KeyboardInterrupt
        with pytest.raises(WindowError, match="at least one micro-batch"), step.window():
            pass
    assert step.open_window is None
