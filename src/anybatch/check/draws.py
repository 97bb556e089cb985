"""Replayed random draws: in every split each row gets the numbers that the whole batch drew for it"""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from anybatch.check.rows import Axis, RowPart, find_axis, select, take
from anybatch.core import accelerator
from anybatch.state import SeenDraws, device_of, expected_of_bernoulli, has_own_generator, rng

Place = tuple[str, bytes]  # a stream and its state


class OutOfTime(BaseException):
    """Raised in a pass at its deadline; no `Exception`, so that no model catches it."""


@dataclass(slots=True, eq=False)
class _Draw:
    value: Tensor  # the drawn numbers
    after: Tensor  # the state of the stream after it
    axis: Axis | None = None  # the axis of the rows; None until a part shows it


class Draws(SeenDraws):
    """The random draws of a whole batch from torch's default streams, replayed for its parts.

    A draw is identified by the state of the stream before it, so a repeated forward finds its own draws.
    Draws from another generator, or after the model has set a seed, are not replayed.

    Args:
        without_dropout: replace Bernoulli draws by their expected value, which switches dropout off.
        is_wide: convert to float64 what the model converts to float32.
    """

    def __init__(self, *, without_dropout: bool = False, is_wide: bool = False) -> None:
        super().__init__()
        self._without_dropout, self._is_wide = without_dropout, is_wide
        self._deadline = math.inf
        with rng.preserved():
            rng.seed_process(rng.derive_seed(0, "check"))  # no seed that a model may set itself
            self._start = rng.capture(rng.of_process())
        self._drawn: dict[Place, _Draw] = {}
        self._next: dict[str, bytes] = {}
        self._part = RowPart.whole(1)
        self.has_packed = False  # True if the rows of some draw are unknown
        self.has_dropout = False  # True if there were draws that `without_dropout` switches off

    def begin(self, part: RowPart, state: rng.RandomState | None = None) -> None:
        """Begin a micro-batch: reset the streams to the start of the pass, or to a state."""
        rng.restore(self._start)
        if state is not None:
            rng.restore(state)
        self._part = part
        now = rng.capture()
        self._next = {"cpu": bytes(now.cpu.tolist())}
        streams = zip(accelerator.generators(), now.devices, strict=True)
        self._next |= {str(stream.device): bytes(state.tolist()) for stream, state in streams}
        self.unreplayed = 0

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

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Replay a draw of the whole batch, or record it."""
        device = device_of(args, kwargs)
        stream = accelerator.generator_of(device)
        is_own = has_own_generator(args, kwargs)
        if not is_own and "bernoulli_" in func.__name__:
            self.has_dropout = True
            if self._without_dropout:
                return expected_of_bernoulli(args)
        before = stream.get_state()
        key = (str(device), bytes(before.tolist()))
        draw = None if is_own else self._drawn.get(key)
        if draw is not None:
            value = self._answer(draw, func, args, kwargs)
            stream.set_state(draw.after)
            return value
        result = func(*args, **kwargs)
        if is_own or not self._part.is_whole or key[1] != self._next.get(key[0]):
            self.unreplayed += 1
            return result
        after = stream.get_state()
        self._drawn[key] = _Draw(_numbers(func, args, result).detach().clone(), after)
        self._next[key[0]] = bytes(after.tolist())
        return result

    def _answer(self, draw: _Draw, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the rows of a recorded draw in the form of this operation's result."""
        result: Any = func(*args, **kwargs)
        like = _numbers(func, args, result)
        value = self._rows_of(draw, like.shape)
        if value is not None and "randperm" in func.__name__ and len(value) < len(draw.value):
            pass  # a permutation of other items than the whole's
        elif value is None:
            self.unreplayed += 1
        elif _is_rrelu(func):  # RReLU writes its slopes into its second argument, for backward
            cast("Tensor", result).copy_(args[0] * like.copy_(value))
        elif isinstance(result, tuple):  # native_dropout: the values kept, and the mask
            probability = args[1]
            scale = 0.0 if probability == 1 else 1 / (1 - probability)
            return args[0] * value * scale, value.clone()
        else:
            like.copy_(value)
        return result

    def _rows_of(self, draw: _Draw, shape: torch.Size) -> Tensor | None:
        part, value = self._part, draw.value
        if part.is_whole:
            return value if value.shape == shape else None
        draw.axis = draw.axis or find_axis(value.shape, shape, part)
        if len(part.rows) == part.total:
            return select(value, draw.axis, part)
        if shape == value.shape or find_axis(value.shape, shape, part):
            return take(value, shape, part)
        self.has_packed = True
        return None


def _is_rrelu(func: Any) -> bool:
    return "rrelu_with_noise" in func.__name__


def _numbers(func: Any, args: Sequence[Any], result: Any) -> Tensor:
    return args[1] if _is_rrelu(func) else result[1] if isinstance(result, tuple) else result
