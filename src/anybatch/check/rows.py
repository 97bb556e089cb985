"""Rows in tensors: on which axis they lie, how a part is taken out, and whether parts make up the whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch, in the order in which they stand in a micro-batch.

    Args:
        rows: their places in the batch.
        total: rows of the batch.

    Example:
        >>> Part((3, 4), 8).is_whole, Part.whole(3)
        (False, Part(rows=(0, 1, 2), total=3))
    """

    rows: tuple[int, ...]
    total: int

    @staticmethod
    def whole(total: int) -> "Part":
        """All rows in their order."""
        return Part(tuple(range(total)), total)

    @property
    def is_whole(self) -> bool:
        """True for all rows in their order."""
        return self == Part.whole(self.total)


class Axis(NamedTuple):
    """The axis on which rows lie, and how many entries each row has there (heads, tokens, windows)."""

    place: int
    per_row: int


def find_axis(whole: Sequence[int], piece: Sequence[int], part: Part) -> Axis | None:
    """The first axis that shrinks from `total * n` to `rows * n`; None where none does, or none need to.

    Example:
        >>> find_axis((5, 8, 3), (5, 2, 3), Part((0, 1), 8))
        Axis(place=1, per_row=1)
        >>> find_axis((32, 3), (8, 3), Part((0, 1), 8))
        Axis(place=0, per_row=4)
    """
    if len(whole) != len(piece) or len(part.rows) == part.total:
        return None
    for place, (size, got) in enumerate(zip(whole, piece, strict=True)):
        per_row, rest = divmod(size, part.total)
        if not rest and per_row and got == per_row * len(part.rows):
            return Axis(place, per_row)
    return None


def select(value: Tensor, axis: Axis | None, part: Part) -> Tensor:
    """The entries of some rows; all of them where rows lie on no axis.

    Example:
        >>> select(torch.arange(6), Axis(0, 2), Part((2, 0), 3))
        tensor([4, 5, 0, 1])
    """
    if axis is None:
        return value
    rows = torch.tensor(part.rows, device=value.device)
    parted = value.unflatten(axis.place, (part.total, axis.per_row)).index_select(axis.place, rows)
    return parted.flatten(axis.place, axis.place + 1)


def take(value: Tensor, shape: Sequence[int], part: Part) -> Tensor | None:
    """What of a whole batch's tensor belongs to a part that has this shape.

    Other axes that are longer in the whole (rows padded to a longer row) are cut short at their end.

    Returns:
        A tensor of that shape, or None where the shapes do not say what belongs together.

    Example:
        >>> take(torch.arange(12).view(4, 3), (1, 2), Part((1,), 4))
        tensor([[3, 4]])
    """
    if value.dim() != len(shape):
        return None
    if tuple(value.shape) == tuple(shape):
        return value
    axis = find_axis(value.shape, shape, part)
    # Without an axis of rows, a shorter first axis is more likely rows that got lost.
    return None if axis is None and value.shape[0] != shape[0] else shorten(select(value, axis, part), shape)


def shorten(value: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The beginning of each axis; None where the value is shorter than that.

    Example:
        >>> shorten(torch.arange(6).view(2, 3), (2, 1)).tolist()
        [[0], [3]]
    """
    if value.dim() != len(shape) or any(a < b for a, b in zip(value.shape, shape, strict=True)):
        return None
    for place, wanted in enumerate(shape):
        value = value.narrow(place, 0, wanted)
    return value


def agree(whole: Tensor, pieces: Sequence[tuple[Tensor, Part]], tolerance: float) -> bool | None:
    """Whether the tensors of micro-batches are those of the whole batch; None where nobody can tell.

    Args:
        whole: of the whole batch.
        pieces: of each micro-batch, with its rows.
        tolerance: relative error that counts as rounding.

    Example:
        >>> parts = Part((0, 1), 3), Part((2,), 3)
        >>> agree(torch.arange(3.0), list(zip(torch.arange(3.0).split(2), parts)), 0.0)
        True
    """
    expected = [take(whole, piece.shape, part) for piece, part in pieces]
    found = [value for value in expected if value is not None]
    if len(found) == len(pieces):
        return all(is_close(piece, value, tolerance) for (piece, _), value in zip(pieces, found, strict=True))
    joined = _join(whole, [piece for piece, _ in pieces])
    return None if joined is None else is_close(joined, whole, tolerance)


def _join(whole: Tensor, pieces: Sequence[Tensor]) -> Tensor | None:
    """Pieces one after the other along the axis on which their sizes add up (packed tokens)."""
    for axis in range(whole.dim()):
        rest = [(*p.shape[:axis], *p.shape[axis + 1 :]) for p in pieces if p.dim() == whole.dim()]
        same = all(shape == (*whole.shape[:axis], *whole.shape[axis + 1 :]) for shape in rest)
        if same and len(rest) == len(pieces) and sum(p.shape[axis] for p in pieces) == whole.shape[axis]:
            return torch.cat(list(pieces), axis)
    return None


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors are the same up to rounding; infinities and NaN have to stand at the same places.

    Example:
        >>> is_close(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), 0.0)
        True
    """
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    one, other = one[finite], other[finite]
    if not one.numel():
        return True
    size = other.abs().max().item() or one.abs().max().item()
    # Relative to the largest entry first: the fill value of a mask may be too large to be squared.
    difference = torch.linalg.vector_norm((one - other) / (size or 1.0)).item()
    return difference <= tolerance * math.sqrt(one.numel())
