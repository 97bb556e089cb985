"""Tensors that ranks share (DTensor): the part of this rank, and the whole."""

from typing import Any

from torch import Tensor


def is_shard(value: object) -> bool:
    """Return True for a DTensor, as the parameters of a sharded model are."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def local(value: Any) -> Tensor:
    """Return the part of a tensor on this rank; a plain tensor as it is."""
    return value.to_local() if is_shard(value) else value


def whole(value: Any) -> Tensor:
    """Return the whole of a tensor; for a DTensor a collective of all its ranks."""
    return value.full_tensor() if is_shard(value) else value
