"""Selective recompute: keep matrix products, convolutions and attention, recompute the rest"""

from collections import Counter
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from anybatch.core import torch_private as private

#: Operations in `torch.ops.aten` whose results are kept, if this torch has them.
KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_int_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its recomputation, for `torch.utils.checkpoint`.

    The second allows more than torch's: several backward passes, and other operations that run more or less
    often than the first time. If a kept result was changed in place, or attention has dropout (the draws
    after it would differ), the whole block is recomputed.
    """
    keeping = _Keeping(create_selective_checkpoint_contexts(_policy)[0])
    return keeping, _Reusing(keeping)


class _Mode(private.TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code runs under it as usual."""
        return True


class _Keeping(_Mode):
    """A dispatch mode that keeps results, and sees writes to their memory.

    Not all writes move a version: a GRU adds in place to parts of a product, and so does `.data`.
    """

    def __init__(self, keeping: Any) -> None:
        super().__init__()
        self.store: dict[Any, dict[int, Any]] = keeping.storage  # operation -> number of the call -> result
        self.is_written, self._keeping = False, keeping
        self._places = set[int]()  # of the memory of kept results

    def __enter__(self) -> Self:
        self._keeping.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keeping.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._places and private.memory_of(func)[0]:
            self.is_written = self.is_written or not self._places.isdisjoint(_places((args, kwargs)))
        result = func(*args, **kwargs)
        if _policy(None, func, *args, **kwargs) == CheckpointPolicy.MUST_SAVE:
            self._places.update(_places(result))
        return result


def _places(nest: Any) -> list[int]:
    leaves = private.pytree.tree_leaves(nest)
    tensors = [one for one in leaves if isinstance(one, Tensor) and one.layout is torch.strided]
    return [one.untyped_storage().data_ptr() for one in tensors]


class _Reusing(_Mode):
    """A dispatch mode that returns kept results; other operations run."""

    def __init__(self, keeping: _Keeping) -> None:
        super().__init__()
        self._kept, self._store = keeping, keeping.store
        # torch 2.6: those kept only, in a list
        self._is_dense = getattr(self._store, "default_factory", None) is list
        self._is_last = False
        self._came: Counter[Any] = Counter()

    def __enter__(self) -> Self:
        # If one result was changed in place, none is used.
        wrappers = [leaf for leaf in private.pytree.tree_leaves(self._store) if hasattr(leaf, "val")]
        if self._kept.is_written or any(
            isinstance(one.val, Tensor) and private.version(one.val) != one.version for one in wrappers
        ):
            self._store.clear()
        for op, results in self._store.items():
            self._store[op] = dict(enumerate(results)) if isinstance(results, list) else results
        self._is_last = not private.is_graph_kept()
        self._came.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_dense and _policy(None, func, *args, **(kwargs or {})) != CheckpointPolicy.MUST_SAVE:
            return func(*args, **(kwargs or {}))
        place = self._came[func]
        self._came[func] += 1
        results = self._store.get(func, {})
        # Free each result in its last use.
        found = results.pop(place, None) if self._is_last else results.get(place)
        if not any(hasattr(leaf, "val") for leaf in private.pytree.tree_leaves(found)):
            return func(*args, **(kwargs or {}))
        return private.pytree.tree_map(_unwrapped, found)


def _unwrapped(wrapper: Any) -> Any:
    """Return a new tensor each time, because autograd writes to it."""
    return wrapper.val.detach() if isinstance(wrapper.val, Tensor) else wrapper.val


def _policy(_: SelectiveCheckpointContext | None, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(op, "overloadpacket", None)
    is_kept = packet in _kept() and not _drops_out(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _kept() -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in KEPT if hasattr(torch.ops.aten, name))


def _drops_out(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in private.arguments_of(op)]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))
