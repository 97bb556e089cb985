"""The draws of a check: replayed, in float64, until a deadline"""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anybatch.state import rng
from anybatch.trial import Replayed


class OutOfTime(BaseException):
    """Raised in a pass at its deadline; no `Exception`, so that no model catches it."""


class Draws(Replayed):
    """The random draws of a whole batch, replayed for its parts.

    Args:
        without_dropout: replace Bernoulli draws by their expected value, which switches dropout off.
        is_wide: convert to float64 what the model converts to float32.
    """

    def __init__(self, *, without_dropout: bool = False, is_wide: bool = False) -> None:
        super().__init__(without_dropout=without_dropout)
        self._is_wide, self._deadline = is_wide, math.inf
        with rng.preserved():
            rng.seed_process(rng.derive_seed(0, "check"))  # no seed that a model may set itself
            self.recorded.start = rng.capture(rng.of_process())

    def restarted(self, *, without_dropout: bool = False) -> "Draws":
        """Return new draws, which are the same numbers."""
        return Draws(without_dropout=without_dropout, is_wide=self._is_wide)

    @contextmanager
    def until(self, deadline: float) -> Generator[None]:
        """Raise OutOfTime in the operations inside after a deadline, on the clock of `time.perf_counter`."""
        before = self._deadline
        self._deadline = min(before, deadline)
        try:
            yield
        finally:
            self._deadline = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if time.perf_counter() > self._deadline:
            raise OutOfTime
        if self._is_wide and kwargs.get("dtype") is torch.float32 and "_to_copy" in func.__name__:
            kwargs = {**kwargs, "dtype": torch.float64}
        return super().__torch_dispatch__(func, types, args, kwargs)
