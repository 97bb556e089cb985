"""What is going on just now, told without an import upward: whether a copy on the host is being made."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_MOVING: ContextVar[bool] = ContextVar("moving to the host", default=False)


def is_moving() -> bool:
    """Whether what is made just now is the copy on the host: a meter can book it there, not on the device.

    Example:
        >>> is_moving()
        False
    """
    return _MOVING.get()


@contextmanager
def moving() -> Generator[None]:
    """While a storage is copied to the host."""
    token = _MOVING.set(True)
    try:
        yield
    finally:
        _MOVING.reset(token)
