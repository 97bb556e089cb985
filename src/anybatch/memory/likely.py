"""What is likely to be in a tensor without values: counts add up, and no number is NaN or infinite."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.core import torch_private as private

_ATEN: Any = torch.ops.aten
_SUMS = (_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.count_nonzero.default)
_ADDS = (_ATEN.add.Tensor, _ATEN.add_.Tensor)
_LOOK = _ATEN._amp_foreach_non_finite_check_and_unscale_.default
_BROKEN = (_ATEN.isnan.default, _ATEN.isinf.default)
_OF_ONE: dict[Any, Callable[[Any], bool]] = {
    _ATEN.any.default: bool,
    _ATEN.any.dim: bool,
    _ATEN.any.dims: bool,
    _ATEN.all.default: bool,
    _ATEN.all.dim: bool,
    _ATEN.all.dims: bool,
    _ATEN.logical_not.default: operator.not_,
    _ATEN.bitwise_not.default: operator.not_,
}
_OF_TWO: dict[Any, Callable[[Any, Any], bool]] = {
    _ATEN.logical_or.default: operator.or_,
    _ATEN.bitwise_or.Tensor: operator.or_,
    _ATEN.logical_and.default: operator.and_,
    _ATEN.bitwise_and.Tensor: operator.and_,
    _ATEN.mul.Tensor: operator.mul,  # how isfinite joins its two conditions
    _ATEN.eq.Scalar: operator.eq,
    _ATEN.ne.Scalar: operator.ne,
    _ATEN.gt.Scalar: operator.gt,
    _ATEN.ge.Scalar: operator.ge,
    _ATEN.lt.Scalar: operator.lt,
    _ATEN.le.Scalar: operator.le,
}
_EACH = (
    "anybatch_each"  # attribute of a fake: what each of its elements is likely to be, and its version then
)


def note(func: Any, args: Sequence[Any], result: object) -> None:
    """Keep in mind what a result is likely to be, if something is known of what it was made of.

    Args:
        func: the operation.
        args: what it was given.
        result: what it gave, or anything else where that is no tensor.
    """
    if (
        func is _LOOK and not args[1].is_inference()
    ):  # it writes there whether one of many numbers is not finite, and counts no version
        _keep(args[1], 0, private.version(args[1]))
    if not (args and isinstance(args[0], Tensor) and isinstance(result, Tensor)) or result.is_inference():
        return
    each = None
    if result.dtype is torch.bool:
        each = _truth(func, args)
    elif not result.dim():
        each = _count(func, args)
    if each is not None:
        # Written to, through a view too, it is another; an operation in place counts itself afterwards.
        _keep(result, each, private.version(result) + (result is args[0]))


def _keep(tensor: Tensor, each: float, version: int) -> None:
    setattr(tensor, _EACH, (each, version))


def known(tensor: Any) -> Any:
    """What each element is likely to be; None where nobody knows.

    Example:
        >>> from anybatch.memory.fake import FakeMode
        >>> with FakeMode():
        ...     x = torch.ones(3)
        ...     known((x > 0).sum()), known(x.isnan().any()), known(x.max())
        (3, False, None)
    """
    each, version = getattr(tensor, _EACH, (None, 0))
    return each if each is not None and private.version(tensor) == version else None


def _truth(func: Any, args: Sequence[Any]) -> bool | None:
    if func in _BROKEN:
        return False
    if func in _OF_ONE:
        each = known(args[0])
        return None if each is None else _OF_ONE[func](each)
    if len(args) > 1 and args[0] is args[1]:  # only NaN differs from itself
        return {_ATEN.ne.Tensor: False, _ATEN.eq.Tensor: True}.get(func)
    if func is _ATEN.ne.Scalar and args[1] == math.inf:
        return True
    if func in _OF_TWO:
        one, other = [known(each) if isinstance(each, Tensor) else each for each in args[:2]]
        return None if one is None or other is None else bool(_OF_TWO[func](one, other))
    return None


def _count(func: Any, args: Sequence[Any]) -> int | None:
    """The sum of many numbers is how many they are, as if each was 1; what is computed from it is the same.

    Nothing is known of what is computed from 0 but by adding: a weight that came to 0 would leave all
    parameters without a gradient.
    """
    each = known(args[0])
    if func in _SUMS:
        return 0 if each is False else args[0].numel()
    if func is _ATEN.where.self:
        return None if each is None else known(args[1] if each else args[2])
    if func in _ADDS:
        more = known(args[1])
        return None if each is None and more is None else (1 if each is None else each) + (more or 0)
    return each or None
