"""What short tensors were rounded from, as long as nobody writes to these."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor


class Digits:
    """What short tensors were rounded from, for whoever would make them long again.

    Holds no short tensor: with it goes what is known of it.

    Example:
        >>> digits, full = Digits(), torch.tensor([1 / 3])
        >>> short = digits.shortened(full, torch.float16)
        >>> digits.behind(short) is full
        True
        >>> digits.behind(short.add_(1)) is None
        True
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], Tensor, int]] = {}  # by id

    def shortened(self, full: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in a short dtype, whose digits are known from now on; itself if it has this dtype."""
        if torch.is_inference_mode_enabled():  # there nobody counts who writes to a tensor
            with torch.inference_mode(False), torch.no_grad():
                short = full.to(dtype)
        else:
            short = full.to(dtype)
        if short is not full:
            self.note(short, full if torch.is_grad_enabled() else full.detach())
        return short

    def note(self, short: Tensor, full: Tensor) -> None:
        """These are the digits behind a short tensor, as it is now."""
        key, known = id(short), self._known
        weak = ref(short, lambda _: known.pop(key, None))
        known[key] = weak, full, short._version  # pyright: ignore[reportPrivateUsage]

    def behind(self, short: Tensor) -> Tensor | None:
        """What a short tensor was made from; None if nobody knows, or it has become another."""
        found = self._known.get(id(short))
        if found is None or found[0]() is not short:
            return None
        _, full, version = found
        # A block under a checkpoint gives what has no graph yet, and gets one afterwards.
        if full.requires_grad != short.requires_grad:
            return None
        is_written = version != short._version  # pyright: ignore[reportPrivateUsage]
        return None if is_written or _is_awaited(short) else full

    def forget(self) -> None:
        """Nothing is known any more."""
        self._known.clear()


def _is_awaited(short: Any) -> bool:
    """Whether somebody waits for the gradient of this very tensor."""
    hooks: Callable[..., Any] | None = short._backward_hooks
    return bool(hooks) or short.retains_grad
