"""Replayed random draws: in every split each row gets the numbers that the whole batch drew for it"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from anybatch.core import accelerator
from anybatch.state import SeenDraws, device_of, has_own_generator, is_dropout, rng

Moment = tuple[str, bytes]  # a stream and its state


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a batch, in their order in a micro-batch."""

    rows: tuple[int, ...]  # their places in the batch
    total: int  # rows of the batch

    @staticmethod
    def whole(total: int) -> "RowPart":
        """Return all rows in their order."""
        return RowPart(tuple(range(total)), total)

    def only(self, rows: Sequence[int]) -> "RowPart":
        """Return some of these rows, by their places in the micro-batch."""
        return RowPart(tuple([self.rows[row] for row in rows]), self.total)

    @property
    def is_whole(self) -> bool:
        """True for all rows in their order."""
        return self == RowPart.whole(self.total)


class Axis(NamedTuple):
    """The axis of the rows, and the entries of each row on it (heads, tokens, windows)."""

    place: int
    per_row: int


def find_axis(whole: Sequence[int], piece: Sequence[int], part: RowPart) -> Axis | None:
    """Return the first axis that shrinks from `total * n` to `rows * n`; None if there is none."""
    if len(whole) != len(piece) or len(part.rows) == part.total:
        return None
    for place, (size, got) in enumerate(zip(whole, piece, strict=True)):
        per_row, rest = divmod(size, part.total)
        if not rest and per_row and got == per_row * len(part.rows):
            return Axis(place, per_row)
    return None


def select(value: Tensor, axis: Axis | None, part: RowPart) -> Tensor:
    """Return the entries of some rows; all of them if there is no axis of rows."""
    if axis is None:
        return value
    rows = torch.tensor(part.rows, device=value.device)
    parted = value.unflatten(axis.place, (part.total, axis.per_row)).index_select(axis.place, rows)
    return parted.flatten(axis.place, axis.place + 1)


def take(value: Tensor, shape: Sequence[int], part: RowPart, *, from_end: bool = False) -> Tensor | None:
    """Return the entries of a whole tensor that belong to a part of this shape; trim other axes."""
    if value.dim() != len(shape):
        return None
    if tuple(value.shape) == tuple(shape):
        return value
    axis = find_axis(value.shape, shape, part)
    # Without an axis of rows, a shorter first axis means lost rows.
    if axis is None and value.shape[0] != shape[0]:
        return None
    return shorten(select(value, axis, part), shape, from_end=from_end)


def shorten(value: Tensor, shape: Sequence[int], *, from_end: bool = False) -> Tensor | None:
    """Return the beginning of each axis, or its end; None if the value is shorter."""
    if value.dim() != len(shape) or any(a < b for a, b in zip(value.shape, shape, strict=True)):
        return None
    for place, wanted in enumerate(shape):
        value = value.narrow(place, value.shape[place] - wanted if from_end else 0, wanted)
    return value


@dataclass(slots=True, eq=False)
class _Draw:
    value: Tensor  # the drawn numbers
    after: Tensor  # the state of the stream after it
    items: list[int]  # the numbers of items that it chooses from
    axis: Axis | None = None  # the axis of the rows; None until a part shows it


@dataclass(slots=True, eq=False)
class _Recorded:
    start: rng.RandomState  # of each micro-batch
    drawn: dict[Moment, _Draw]
    count: int = 0  # draws of the whole batch


class Replayed(SeenDraws):
    """The random draws of a whole batch from torch's default streams, replayed for its parts.

    A draw is identified by the state of the stream before it, so a repeated forward finds its own draws.
    Draws from another generator, or after the model has set a seed, are not replayed.

    Attributes:
        count: draws of this micro-batch, without dropout that is switched off.
        others: draws that choose from other items than the whole's, as a permutation of fewer rows.
        has_packed: True if the rows of some draw are unknown.
        has_dropout: True if there were draws that `without_dropout` switches off.
    """

    def __init__(self, *, without_dropout: bool = False, like: "Replayed | None" = None) -> None:
        super().__init__()
        self._without_dropout, self.count, self.others = without_dropout, 0, 0
        self.recorded = _Recorded(rng.capture(rng.of_process()), {}) if like is None else like.recorded
        self._next: dict[str, bytes] = {}
        self._part = RowPart.whole(1)
        self.has_packed = self.has_dropout = False

    def begin(self, part: RowPart, state: rng.RandomState | None = None) -> None:
        """Begin a micro-batch: reset the streams to the start of the pass, or to a state."""
        rng.restore(self.recorded.start)
        if state is not None:
            rng.restore(state)
        self._part = part
        now = rng.capture()
        self._next = {"cpu": bytes(now.cpu.tolist())}
        streams = zip(accelerator.generators(), now.devices, strict=True)
        self._next |= {str(stream.device): bytes(state.tolist()) for stream, state in streams}
        self.unreplayed = self.count = 0

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Replay a draw of the whole batch, or record it."""
        device = device_of(args, kwargs)
        stream = accelerator.generator_of(device)
        is_own = has_own_generator(args, kwargs)
        if not is_own and is_dropout(func):
            self.has_dropout = True
            if self._without_dropout:
                return super().draw(func, args, kwargs)
        self.count += 1
        before = stream.get_state()
        key = (str(device), bytes(before.tolist()))
        draw = None if is_own else self.recorded.drawn.get(key)
        if draw is not None:
            value = self._answer(draw, func, args, kwargs)
            stream.set_state(draw.after)
            return value
        result = func(*args, **kwargs)
        if is_own or not self._part.is_whole or key[1] != self._next.get(key[0]):
            self.unreplayed += 1
            return result
        after = stream.get_state()
        self.recorded.count = self.count
        self.recorded.drawn[key] = _Draw(
            _numbers(func, args, result).detach().clone(), after, _items_of(func, args)
        )
        self._next[key[0]] = bytes(after.tolist())
        return result

    def _answer(self, draw: _Draw, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the rows of a recorded draw in the form of this operation's result."""
        result: Any = func(*args, **kwargs)
        like = _numbers(func, args, result)
        value = self._rows_of(draw, like.shape)
        if not like.is_floating_point() and draw.items != _items_of(func, args):
            self.others += 1
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


def _items_of(func: Any, args: Sequence[Any]) -> list[int]:
    """Return the numbers that bound a draw of integers, as in `randperm(rows)` or `multinomial`."""
    weights = [args[0].shape[-1]] if "multinomial" in func.__name__ else []
    return [*weights, *[one for one in args if isinstance(one, int)]]


def _numbers(func: Any, args: Sequence[Any], result: Any) -> Tensor:
    return args[1] if _is_rrelu(func) else result[1] if isinstance(result, tuple) else result
