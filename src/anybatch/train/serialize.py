"""Nested values split into tensors and JSON, and rebuilt, without pickle."""

import ctypes
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, strided

from anybatch.core import CheckpointError

_TAG = "$"  # marks types that JSON lacks: {"$": "tuple", "of": [...]}


class Packer:
    """A converter of nested values to JSON and dense CPU `tensors`; tied tensors are stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[tuple[object, ...], str] = {}  # identity -> key
        self._seen: list[Tensor] = []  # references, so that no address is reused
        self._storages: set[int] = set()

    def pack(self, value: Any, path: str) -> Any:
        """Return JSON for a value; store its tensors under their paths."""
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "of": self._keep(value, path)}
        if isinstance(value, float) and not math.isfinite(value):
            return {_TAG: "float", "of": str(value)}  # not in JSON
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (list, tuple):
            items = [self.pack(item, f"{path}/{index}") for index, item in enumerate(value)]
            return items if type(value) is list else {_TAG: "tuple", "of": items}
        if isinstance(value, Mapping):
            mapping = cast("Mapping[Any, Any]", value)
            pairs = [(key, self.pack(item, f"{path}/{key}")) for key, item in mapping.items()]
            if isinstance(value, Counter):
                return {_TAG: "counter", "of": pairs}
            if all(isinstance(key, str) for key, _ in pairs) and _TAG not in value:
                return dict(pairs)
            if all(isinstance(key, int | str) and not isinstance(key, bool) for key, _ in pairs):
                return {_TAG: "dict", "of": pairs}
        raise CheckpointError(
            f"{path}: expected tensors, numbers, strings, lists, tuples or dicts, got {type(value).__name__}."
            " A checkpoint is never pickled; give that object a state_dict() of plain values."
        )

    def _keep(self, value: Tensor, path: str) -> str:
        value = value.detach()
        if value.layout != strided or value.is_meta or value.is_quantized:
            raise CheckpointError(
                f"{path}: expected a dense tensor that holds values, got {value.layout} on {value.device}. "
                "Make it dense, or leave it out."
            )
        identity = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() and identity in self._keys:
            return self._keys[identity]
        while path in self.tensors:  # another value has this path: {"a/b": ...} and {"a": {"b": ...}}
            path += "'"
        self._keys[identity] = path
        self._seen.append(value)
        stored = value.cpu().resolve_conj().resolve_neg().contiguous()
        if stored.untyped_storage().data_ptr() in self._storages:
            stored = stored.clone()  # safetensors refuses tensors that overlap
        self._storages.add(stored.untyped_storage().data_ptr())
        self.tensors[path] = stored
        return path


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the value of `Packer.pack`; other JSON raises an error."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    mapping = cast("dict[str, Any]", value)
    of: Any = mapping.get("of")
    match mapping.get(_TAG):
        case None:
            return {key: unpack(item, tensors) for key, item in mapping.items()}
        case "tensor":
            return tensors[of]
        case "float":
            return float(of)
        case "tuple":
            return tuple(unpack(of, tensors))
        case "dict":
            return {key: unpack(item, tensors) for key, item in of}
        case "counter":
            return Counter({key: unpack(item, tensors) for key, item in of})
        case kind:
            raise ValueError(f"a value of the kind {kind!r}")


def digest_of(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of all tensors, and of the JSON."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            size = value.numel() * value.element_size()
            digest.update((ctypes.c_ubyte * size).from_address(value.data_ptr()))  # no copy
    return digest.hexdigest()
