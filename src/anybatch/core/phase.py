"""Context flags for lower layers: copying to the host, recomputing a block, running a batch."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial


class _During:
    """A context in which a flag is set. No generator: those fail to pass on an exception that is frozen."""

    def __init__(self, phase: ContextVar[bool]) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._token = self._phase.set(True)

    def __exit__(self, *_: object) -> None:
        self._phase.reset(self._token)


def _phase(name: str) -> tuple[Callable[[], _During], Callable[[], bool]]:
    flag = ContextVar(name, default=False)
    return partial(_During, flag), flag.get


moving, is_moving = _phase("copying a storage to the host, where a meter counts the copy")
recomputing, is_recomputing = _phase("recomputing a block in backward")
# Set and reset by a step itself: a context manager takes a microsecond.
running = ContextVar("running forward and backward of a batch in a step", default=False)
