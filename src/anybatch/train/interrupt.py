"""Ctrl-C and SIGTERM while training: the current update is finished first."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A deferred signal."""

    def __init__(self) -> None:
        self.signal = 0  # number of the signal; 0 for none

    def obey(self, told: str = "") -> None:
        """Raise KeyboardInterrupt with this text after Ctrl-C, SystemExit after SIGTERM; else do nothing."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(told)
        if self.signal:
            raise SystemExit(128 + self.signal)


@contextmanager
def deferred() -> Generator[Interruption]:
    """Defer a first Ctrl-C or SIGTERM until `obey` is called; a second one acts at once.

    Outside the main thread, where Python cannot handle signals, this does nothing. An ignored signal (Ctrl-C
    in a shell's background job) stays ignored.
    """
    interruption, is_main = Interruption(), threading.current_thread() is threading.main_thread()
    before = {
        number: handler
        for number in SIGNALS
        if is_main and (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }

    def note(number: int, frame: FrameType | None) -> None:
        interruption.signal = number
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        restore()
