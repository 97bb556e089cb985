"""Peak bytes of the tensor storages alive at once, each counted once, from its first sight to its end."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Follows the storages of all tensors that operations take or return, in forward, backward and update.

    A view adds nothing: it shares its storage. A storage ends when its last tensor (or saved tensor) is gone.
    Storages that live only inside one kernel are not seen. On the CPU autograd runs backward in the calling
    thread, under the same mode.

    Args:
        held: tensors alive before the measurement (parameters, optimizer state): counted from the start.
        apart: tensors never counted (the logical batch, which is the caller's); copies of them are.

    Example:
        >>> import torch
        >>> with PeakBytes() as meter:
        ...     x = torch.zeros(256)  # 1,024 bytes
        ...     y = x.view(16, 16)    # a view
        ...     del x, y
        ...     z = torch.zeros(64)
        >>> meter.peak, meter.live
        (1024, 256)
    """

    def __init__(self, *, held: Iterable[Tensor] = (), apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._followed: dict[int, tuple[weakref.ref[Any], int]] = {}
        # The storages are kept, so that their ids stay theirs.
        self._apart = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in apart)}
        self.apart = sum(storage.nbytes() for storage in self._apart.values())
        for tensor in held:
            self._see(tensor)
        self.held = self.live

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._apart:
            return
        if key in self._followed:
            reference, known = self._followed[key]  # a storage may be resized in place
        else:
            # Called when the storage itself ends, not a Python handle to it: until then its id stays taken.
            reference, known = weakref.ref(storage, partial(self._end, key)), 0
        self._followed[key] = reference, size
        self.live += size - known
        self.peak = max(self.peak, self.live)

    def _end(self, key: int, _: object) -> None:
        self.live -= self._followed.pop(key)[1]
