"""Tensors and nested values in files: safetensors, of which each rank has a slice, and JSON; no pickle."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import safe_open
from torch import Tensor, strided

from anybatch.core import CheckpointError, is_shard, local, torch_private as private

_NAMES = (  # of dtypes in torch and in safetensors
    "float64 F64, float32 F32, float16 F16, int64 I64, int32 I32, int16 I16, int8 I8, uint64 U64, "
    "uint32 U32, uint16 U16, uint8 U8, bfloat16 BF16, bool BOOL, complex64 C64, float8_e4m3fn F8_E4M3, "
    "float8_e5m2 F8_E5M2"
)
_CODES = {getattr(torch, name): code for name, code in map(str.split, _NAMES.split(", "))}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and sync a safetensors file, one tensor after the other; return its SHA-256.

    Of a DTensor this rank's slice is written. Raises CheckpointError for a dtype that the format lacks.
    """
    pairs = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # aligned
    values = {name: local(value) for name, value in pairs}
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, value in values.items():
        if value.dtype not in _CODES:
            raise CheckpointError(f"{name}: expected one of {[*_CODES]}, got {value.dtype}. Convert it.")
        start, end = end, end + value.nbytes
        header[name] = {"dtype": _CODES[value.dtype], "shape": [*value.shape], "data_offsets": [start, end]}
    text, digest = json.dumps(header).encode(), hashlib.sha256()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        for part in chain([len(text).to_bytes(8, "little"), text], map(bytes_of, values.values())):
            digest.update(part)
            file.write(part)
        sync(file)
    return digest.hexdigest()


def sync(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, if the system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forms_in(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor in a file."""
    with safe_open(path, framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (views: nothing is read)
        return {key: (value.dtype, tuple(value.shape)) for key, value in found.items()}


class Stored:
    """A tensor in the files of a checkpoint, each of which has a slice [start, stop) along a dimension.

    `forms` are the results of `forms_in` by name of a file; a slice is [file, start, stop]. Raises an error
    if the slices are not the tensor, or a file has others.
    """

    def __init__(
        self, key: str, folder: Path, forms: Mapping[str, Any], dtype: str, shape: Any, dim: int, slices: Any
    ) -> None:
        self.key, self.folder, self.shape, self.dim = key, folder, tuple(shape), dim
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._sizes = self.shape or (1,)
        torch.empty(self.shape, dtype=self.dtype, device="meta")  # raises for what is no shape
        self._slices: list[tuple[str, int, int]] = [*map(tuple, slices)]
        end = 0 if all(self._sizes) else self._sizes[dim]  # nothing is stored of an empty tensor
        for name, start, stop in self._slices:
            expected = self.dtype, self._part(stop - start)[: len(self.shape)]
            if not start == end < stop or forms[name][key] != expected:
                raise ValueError(
                    f"{key} in {name} as {forms[name][key]}, as [{start}, {stop}) of {self.shape}"
                )
            end = stop
        if end != self._sizes[dim]:
            raise ValueError(f"{key} up to {end} of {self.shape}")

    def _part(self, rows: int) -> tuple[int, ...]:
        return (*self._sizes[: self.dim], rows, *self._sizes[self.dim + 1 :])

    def read(self, like: Any = None, *, is_local: bool = False) -> Any:
        """Read the tensor; for a DTensor of its shape only this rank's slice, as such a DTensor or local."""
        if not is_shard(like) or like.shape != self.shape:
            return self._read(self.dim, 0, self._sizes[self.dim]).reshape(self.shape)
        dim, _, (start, stop) = slices_of(like)
        mine = self._read(dim, start, stop).reshape(local(like).shape)
        if is_local:
            return mine
        mine = mine.to(local(like).device)
        kind = {"shape": like.shape, "stride": like.stride(), "run_check": False}
        return type(like).from_local(mine, like.device_mesh, like.placements, **kind)

    def _read(self, dim: int, start: int, stop: int) -> Tensor:
        """Read [start, stop) along a dimension: files are mapped, so hardly any other bytes are read."""
        first, last = (start, stop) if dim == self.dim else (0, self._sizes[self.dim])
        parts = [torch.empty(self._part(0), dtype=self.dtype)]
        for name, begin, end in self._slices:
            low, high = max(first, begin), min(last, end)
            if low < high:
                with safe_open(self.folder / name, framework="pt") as file:
                    piece: Tensor = file.get_tensor(self.key).reshape(self._part(end - begin))
                parts.append(piece.narrow(self.dim, low - begin, high - low))
        if dim != self.dim:
            parts = [one.narrow(dim, start, stop - start) for one in parts]
        return torch.cat(parts, self.dim)


def slices_of(value: Any, writer: int = 0) -> tuple[int, dict[int, tuple[int, int]], tuple[int, int]]:
    """Return the dimension along which a tensor is cut, the slice of each rank that writes, and the own one.

    One that is not cut is written by `writer` alone. Raises CheckpointError for a DTensor that is cut along
    two axes of its mesh, or holds parts of a sum.
    """
    whole = 0, [*value.shape, 1][0]
    if not is_shard(value):
        return 0, {writer: whole} if value.numel() else {}, whole
    cut = [(axis, one.dim % value.ndim) for axis, one in enumerate(value.placements) if one.is_shard()]
    if len(cut) > 1 or any(one.is_partial() for one in value.placements):
        raise CheckpointError(
            f"Expected tensors that are cut along one axis of a mesh, as fully_shard makes them, got "
            f"{value.placements}. Save such a model with torch.distributed.checkpoint."
        )
    mesh: Tensor = value.device_mesh.mesh
    if not cut:
        return slices_of(local(value), int(mesh.flatten()[0]))
    ((axis, dim),) = cut
    members = mesh.movedim(axis, 0).flatten(1)[:, 0] if mesh.ndim > 1 else mesh
    size = value.shape[dim]
    each = -(-size // len(members))  # as torch.chunk
    slices = [(min(at * each, size), min((at + 1) * each, size)) for at in range(len(members))]
    written = {int(one): place for one, place in zip(members, slices, strict=True) if place[0] < place[1]}
    return dim, written if value.numel() else {}, slices[value.device_mesh.get_coordinate()[axis]]


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
