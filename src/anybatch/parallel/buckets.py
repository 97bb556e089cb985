"""Gradients summed over ranks, bucket by bucket, also while the last backward still makes them."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core import torch_private as private
from anybatch.engine import Gradient
from anybatch.parallel.group import Group, answered, sending_device

_BUCKET = 8 << 20  # bytes of gradients sent together; a larger gradient is sent alone


class Buckets:
    """A sum of gradients over ranks, in buckets that all ranks send in the same order.

    The last bucket also counts the ranks that have a gradient of each parameter, and those that failed. It is
    the smallest one, so that a large gradient is not copied for this. A parameter without gradient on this
    rank counts as zeros if others have one. `like` has the dtypes of sums, in the order in which backward
    finishes the parameters; if it `keeps` gradients, to send them again, they are not written to.
    """

    def __init__(self, like: Mapping[nn.Parameter, torch.dtype], group: Group, *, keeps: bool) -> None:
        self._like, self._group, self._keeps, self.bytes_sent = like, group, keeps, 0
        self._buckets = _cut(like)
        self._left = [*self._buckets]
        self._sent: list[tuple[Tensor, Any]] = []
        self._hooks: list[Any] = []
        self._sources: list[tuple[nn.Parameter, Tensor, int]] = []  # what was sent, and its version
        self.order: dict[nn.Parameter, None] = {}  # in which a watched backward finished
        self._is_spoilt = False  # something was sent that was not finished
        self.is_changed = False  # a gradient was changed after it was sent

    def watch(self, factor: Callable[[], float | None]) -> None:
        """Send buckets of `.grad`, but the last, as backward fills them, times `factor()` if not None."""
        self._is_spoilt = self._is_spoilt or bool(self._sent)  # a second attempt
        self.unwatch()
        self.order, stalled = {}, self._is_spoilt

        def finished(parameter: Tensor) -> None:
            nonlocal stalled
            self.order[cast("nn.Parameter", parameter)] = None
            try:
                while not stalled and len(self._left) > 1:
                    is_full = all(p in self.order for p in self._left[0][::-1])
                    if not is_full or (by := factor()) is None:
                        break
                    held = {p: p.grad for p in self._left[0] if p.grad is not None}
                    self._sources += [(p, one, private.version(one)) for p, one in held.items()]
                    self._send(held, by)
            except Exception:  # memory ran out, or a rank has ended: it is said where the sum is awaited
                stalled = True

        self._hooks = [p.register_post_accumulate_grad_hook(finished) for p in self._like]

    def unwatch(self) -> None:
        """End `watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def finish(self, gradients: Gradient, factor: float = 1.0, *, failed: bool = False) -> Gradient | None:
        """Send what is left, times `factor`, and return the sums; None if it `failed` on some rank."""
        changed = [
            p for p, one, at in self._sources if gradients.get(p) is not one or private.version(one) != at
        ]
        self.is_changed = bool(changed) and not (failed or self._is_spoilt)
        failed = failed or self._is_spoilt or bool(changed)
        while self._left:
            self._send(gradients, factor, failed=failed)
        with answered(self._group):
            for _, work in self._sent:
                work.wait()
        return self._parted()

    def _send(self, gradients: Gradient, factor: float, *, failed: bool = False) -> None:
        """Send the gradients of the next bucket, multiplied, as a vector."""
        parts = [_flat(gradients.get(p), p, self._like[p]) for p in self._left[0]]
        if len(self._left) == 1:
            has = [float(p in gradients) for p in self._like]
            parts.append(torch.tensor([*has, float(failed)], dtype=parts[0].dtype, device=parts[0].device))
        flat = parts[0] if len(parts) == 1 and not self._keeps else torch.cat(parts)
        flat = (flat if factor == 1.0 else flat.mul_(factor)).to(sending_device(flat.device, self._group))
        with answered(self._group):
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._sent.append((flat, work))
        del self._left[0]
        self.bytes_sent += flat.nbytes

    def _parted(self) -> Gradient | None:
        """Return the sums in the vectors of all buckets; None if a rank `failed`."""
        found: Gradient = {}
        values = list[Tensor]()
        for bucket, (flat, _) in zip(self._buckets, self._sent, strict=True):
            sizes = [p.numel() * (1 + p.is_complex()) for p in bucket]
            values = flat.to(bucket[0].device).split_with_sizes([*sizes, flat.numel() - sum(sizes)])
            for p, one in zip(bucket, values, strict=False):
                one = torch.view_as_complex(one.view(-1, 2)) if self._like[p].is_complex else one
                found[p] = one.view(p.shape)
        *counts, failed = values[-1].tolist()
        return None if failed else {p: found[p] for p, n in zip(self._like, counts, strict=True) if n}


def _cut(like: Mapping[nn.Parameter, torch.dtype]) -> list[list[nn.Parameter]]:
    """Return parameters whose gradients are sent together: one device and dtype; the smallest come last."""
    buckets: list[list[nn.Parameter]] = []
    kind, size = None, 0
    for p, dtype in like.items():
        nbytes = p.numel() * dtype.itemsize
        if kind != (p.device, dtype.to_real()) or size + nbytes > _BUCKET:
            buckets.append([])
            kind, size = (p.device, dtype.to_real()), 0
        buckets[-1].append(p)
        size += nbytes
    last = min(reversed(range(len(buckets))), key=lambda at: sum(p.numel() for p in buckets[at]))
    return [*buckets[:last], *buckets[last + 1 :], buckets[last]]


def _flat(gradient: Tensor | None, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a gradient as a vector of real numbers; zeros for None."""
    if gradient is None:
        gradient = torch.zeros(p.shape, dtype=dtype, device=p.device)
    flat = gradient.contiguous().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
