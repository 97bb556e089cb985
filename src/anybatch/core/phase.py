"""Context flags for lower layers: copying to the host, recomputing a block, running a batch."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

_MOVING: ContextVar[bool] = ContextVar("moving to the host", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing a block", default=False)
_RUNNING: ContextVar[bool] = ContextVar("running a batch", default=False)


@contextmanager
def _during(phase: ContextVar[bool]) -> Generator[None]:
    token = phase.set(True)
    try:
        yield
    finally:
        phase.reset(token)


moving = partial(_during, _MOVING)
"""Context: a storage is being copied to the host, so that a meter counts the copy there."""

recomputing = partial(_during, _RECOMPUTING)
"""Context: a block is being recomputed in backward."""

running = partial(_during, _RUNNING)
"""Context: a step runs forward and backward of a batch."""

is_moving = _MOVING.get
is_recomputing = _RECOMPUTING.get
is_running = _RUNNING.get
