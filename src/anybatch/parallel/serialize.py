"""Nested values split into tensors and JSON, and rebuilt, without pickle."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, strided

from anybatch.core import CheckpointError, torch_private as private

_TAG = "$"  # marks types that JSON lacks: {"$": "tuple", "of": [...]}


class Packer:
    """A converter of nested values to JSON and `tensors`, which are not copied; tied ones are kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[tuple[object, ...], str] = {}  # identity -> key

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
        value, own = value.detach(), private.local(value)
        if own.layout != strided or own.is_meta or own.is_quantized:
            raise CheckpointError(
                f"{path}: expected a dense tensor that holds values, got {own.layout} on {own.device}. "
                "Make it dense, or leave it out."
            )
        identity = (own.data_ptr(), value.shape, own.stride(), value.dtype, own.device)
        if own.numel() and identity in self._keys:
            return self._keys[identity]
        while path in self.tensors:  # another value has this path: {"a/b": ...} and {"a": {"b": ...}}
            path += "'"
        self._keys[identity] = path
        self.tensors[path] = value
        return path


def unpack(value: Any, read: Callable[[str], Any]) -> Any:
    """Rebuild the value of `Packer.pack`, with `read` of a tensor's key; other JSON raises an error."""
    if isinstance(value, list):
        return [unpack(item, read) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    mapping = cast("dict[str, Any]", value)
    of: Any = mapping.get("of")
    match mapping.get(_TAG):
        case None:
            return {key: unpack(item, read) for key, item in mapping.items()}
        case "tensor":
            return read(of)
        case "float":
            return float(of)
        case "tuple":
            return tuple(unpack(of, read))
        case "dict":
            return {key: unpack(item, read) for key, item in of}
        case "counter":
            return Counter({key: unpack(item, read) for key, item in of})
        case kind:
            raise ValueError(f"a value of the kind {kind!r}")


def parse_json(text: bytes) -> Any:
    """Return the value of JSON; raise ValueError for a name that occurs twice, NaN and infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant}, which is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a name twice in one object, among {[name for name, _ in pairs][:9]}")
        return found

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def bytes_of(value: Tensor) -> Any:
    """Return the bytes of a tensor as a buffer; it is the tensor's memory if that is dense on the CPU."""
    host = private.local(value).detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy()


def digest_of(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of all tensors, and of a text."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(bytes_of(value))
    return digest.hexdigest()
