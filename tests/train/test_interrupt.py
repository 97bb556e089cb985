"""Ctrl-C between updates: noted first, obeyed when asked, and nothing left behind."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from anybatch.train.interrupt import SIGNALS, deferred


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of a Python program, whatever ran before; back afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def installed() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_the_first_ctrl_c_waits_until_it_is_obeyed_and_the_second_breaks_at_once(signals: int) -> None:
    before = installed()
    with deferred() as interruption:
        assert installed() != before
        interruption.obey()
        if signals:
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT) if signals == 2 else interruption.obey()
    assert installed() == before


def test_own_handlers_come_back_after_the_first_signal_and_after_an_error() -> None:
    heard: list[int] = []
    own = lambda number, frame: heard.append(number)  # noqa: E731
    for number in SIGNALS:
        signal.signal(number, own)
    with deferred() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert installed() == [own, own]
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit, match=str(128 + 15)):  # the code a shell gives for it
            interruption.obey()
    with contextlib.suppress(ZeroDivisionError), deferred():
        raise ZeroDivisionError
    assert installed() == [own, own]
    assert heard == [signal.SIGINT]
