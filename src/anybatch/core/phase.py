"""Context flags for lower layers: copying to the host, recomputing a block, running a batch."""

from contextvars import ContextVar
from functools import partial

_MOVING: ContextVar[bool] = ContextVar("moving to the host", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing a block", default=False)
_RUNNING: ContextVar[bool] = ContextVar("running a batch", default=False)


class _During:
    """A context in which a flag is set. No generator: those fail to pass on an exception that is frozen."""

    def __init__(self, phase: ContextVar[bool]) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._token = self._phase.set(True)

    def __exit__(self, *_: object) -> None:
        self._phase.reset(self._token)


moving = partial(_During, _MOVING)
"""Context: a storage is being copied to the host, so that a meter counts the copy there."""

recomputing = partial(_During, _RECOMPUTING)
"""Context: a block is being recomputed in backward."""

running = partial(_During, _RUNNING)
"""Context: a step runs forward and backward of a batch."""

is_moving = _MOVING.get
is_recomputing = _RECOMPUTING.get
is_running = _RUNNING.get
