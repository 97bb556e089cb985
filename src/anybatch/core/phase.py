"""What is going on just now, told without an import upward: a copy to the host, a block that runs again."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

_MOVING: ContextVar[bool] = ContextVar("moving to the host", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing a block", default=False)


@contextmanager
def _during(phase: ContextVar[bool]) -> Generator[None]:
    token = phase.set(True)
    try:
        yield
    finally:
        phase.reset(token)


moving = partial(_during, _MOVING)
"""While a storage is copied to the host: a meter can book the copy there, not on the device."""

recomputing = partial(_during, _RECOMPUTING)
"""While a block is run again in backward."""

is_moving = _MOVING.get
is_recomputing = _RECOMPUTING.get
