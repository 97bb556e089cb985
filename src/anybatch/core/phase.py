"""What is going on just now, told without an import upward: a copy to the host, a block that runs again."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_MOVING: ContextVar[bool] = ContextVar("moving to the host", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing a block", default=False)


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


def is_recomputing() -> bool:
    """Whether a block is run again in backward just now.

    Example:
        >>> with recomputing():
        ...     is_recomputing()
        True
    """
    return _RECOMPUTING.get()


@contextmanager
def recomputing() -> Generator[None]:
    """While a block is run again in backward."""
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)
