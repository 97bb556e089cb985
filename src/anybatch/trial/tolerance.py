"""The one table of tolerances, and the relative error that is compared with it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.engine import accumulation_dtype

# Roundings of one forward and backward. Measured on the losses and models of the laws: about 5, and 100 if
# distances nearly cancel. Long mantissas leave room for deeper networks; short ones have none, because 16
# roundings in bfloat16 are 6 % already.
_ROUNDINGS = {torch.float64: 2**12, torch.float32: 2**7, torch.float16: 2**4, torch.bfloat16: 2**4}


# A factor for deep networks, which round more than the few layers of the table.
_SLACK = {torch.float64: 16, torch.float32: 16}


def shortest_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the floating dtype with the shortest mantissa; float32 if there is none."""
    found = set(dtypes)
    return next((dtype for dtype in reversed(_ROUNDINGS) if dtype in found), torch.float32)


def limit_of(dtypes: Iterable[torch.dtype], rows: int) -> float:
    """Return the relative error that may be rounding, by the shortest dtype that was computed in."""
    shortest = shortest_of(dtypes)
    return tolerance(shortest, rows) * _SLACK.get(shortest, 1)


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Return how far a gradient or loss may lie from its reference in float64: the one table of tolerances.

    Two errors add up: a fixed number of roundings in the parameters' dtype, and one per addition in the dtype
    of the sum (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2). Compare with
    `relative_error`; additions in the same order need no tolerance.

    Args:
        dtype: of the parameters.
        terms: how many numbers are added up: micro-batches, or rows where one micro-batch is all.

    Example:
        >>> [f"{tolerance(dtype, 100):.0e}" for dtype in (torch.float64, torch.float32, torch.bfloat16)]
        ['5e-13', '1e-05', '6e-02']
    """
    return _ROUNDINGS[dtype] * _rounding(dtype) + terms * _rounding(accumulation_dtype(dtype))


def relative_error(actual: object, expected: object) -> float:
    """Return the 2-norm of the difference over that of the expected, all tensors as one long vector.

    Both are numbers, tensors, or nests of them, such as the gradients of all parameters by name. The error is
    in float64; 0 where both are zero. It is infinite where only the expected is zero, where an entry is not
    finite, or where the nests differ.

    Example:
        >>> relative_error({"weight": torch.tensor([3.0, 4.5])}, {"weight": torch.tensor([3.0, 4.0])})
        0.1
        >>> relative_error(math.nan, 1.0)
        inf
    """
    there, wanted = tree.flatten(_as_tensors(actual)), tree.flatten(_as_tensors(expected))
    shapes = [[leaf.shape for leaf in nest.leaves] for nest in (there, wanted)]
    if there.paths != wanted.paths or shapes[0] != shapes[1]:
        return math.inf
    pairs = [
        (a.detach().cpu().double(), e.detach().cpu().double())
        for a, e in zip(there.leaves, wanted.leaves, strict=True)
    ]
    difference = math.hypot(*[(a - e).norm().item() for a, e in pairs])
    size = math.hypot(*[e.norm().item() for _, e in pairs])
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tensors(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_as_tensors(item) for item in cast("Sequence[Any]", value)]
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
