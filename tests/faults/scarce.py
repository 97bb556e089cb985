"""Memory that runs out at chosen allocations, or whenever too much of it is in use."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from anybatch.engine import Part


class Scarce(TorchDispatchMode):
    """Refuses allocations of watched functions: these, counted from 0, and all while more bytes are held."""

    def __init__(self, refuse: set[int] | None = None, *, most: float = math.inf) -> None:
        super().__init__()
        self.refuse, self.most = refuse or set(), most
        self.count = self.refused = self.watched = 0
        self.held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What writes in place or returns a view allocates nothing.
        is_made = not func._schema.is_mutable and all(one.alias_info is None for one in func._schema.returns)
        if not (self.watched and is_made):
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.count - 1 in self.refuse or sum(self.held.values()) > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        made = func(*args, **(kwargs or {}))
        for one in made if self.most < math.inf and isinstance(made, tuple | list) else [made]:
            if self.most < math.inf and isinstance(one, Tensor):
                self.held[one] = one.nbytes
        return made

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.watched += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.watched -= 1

        return watched


@contextmanager
def scarce(owner: Any, names: str, *args: Any, **options: Any) -> Generator[Scarce]:
    """Memory is scarce while one of `owner`'s functions of these names, put apart by spaces, runs."""
    mode = Scarce(*args, **options)
    with pytest.MonkeyPatch.context() as patch, mode:
        for name in names.split():
            patch.setattr(owner, name, mode.watching(getattr(owner, name)))
        yield mode


# Forward and backward of micro-batches.
scarce_in_passes = partial(scarce, Part, "evaluate backward")
