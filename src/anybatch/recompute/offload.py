"""Offload: tensors that are saved for backward wait in host memory"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, cast
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anybatch.core import PlanError, accelerator, moving, torch_private as private

#: Smaller tensors stay on the device: the latency of a copy is longer than its transfer.
SMALLEST = 64 * 1024
_AHEAD = 64  # storages that are looked at before the one that backward reads

Key = tuple[int, int, torch.dtype]


class HostLink:
    """Copies of storages to the host and back, each as a tensor of one axis; plain copies on the CPU."""

    def away(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Start to copy to the host; return the copy, and a mark that tells when it is done."""
        return flat.clone(), None

    def back(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Start to copy to the device; return the copy, and a mark that tells when it is done."""
        return host.to(device, copy=True), None

    def wait(self, mark: Any) -> None:
        """Order the following computation after the mark."""


class StreamLink(HostLink):
    """Copies on a separate stream, parallel to the computation, from and to pinned memory.

    All device memory is allocated on the computing stream. The streams wait for each other before each copy,
    and before a copied storage is read or freed. No memory is reused while a copy needs it, and none is held
    longer than that, which `record_stream` would do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)

    def away(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Copy to pinned memory."""
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        return host, self._copy(host, flat)

    def back(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Copy from pinned memory."""
        flat = torch.empty(host.shape, dtype=host.dtype, device=device)
        return flat, self._copy(flat, host)

    def wait(self, mark: Any) -> None:
        """Make the computing stream wait."""
        torch.accelerator.current_stream(self._device).wait_event(mark)

    def _copy(self, to: Tensor, source: Tensor) -> torch.Event:
        self._side.wait_stream(torch.accelerator.current_stream(self._device))
        with accelerator.on_stream(self._side):
            to.copy_(source, non_blocking=True)
            return self._side.record_event()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Moved:
    place: int  # in the order of saving
    device: torch.device
    version: int  # of the source when it was saved
    storage: Callable[[], object]  # on the device, until it is freed; its key is unique until then
    source: Tensor | None  # the same, until its copy is done
    host: Tensor  # its copy; the source itself until the operation is done
    mark: Any = None  # when the copy is done
    taken: Callable[[], Tensor | None] = lambda: None  # the storage that came back, while it is used
    is_changed: bool = False  # True if the source was written to before it left

    def look(self) -> None:
        """Check if the source was written to, which the copy may or may not have seen."""
        if self.source is not None and private.version(self.source) != self.version:
            self.is_changed = True


#: A tensor that autograd saved, as a view of a moved storage: sizes, strides and offset.
Saved = tuple[_Moved, torch.Size, tuple[int, ...], int]


class Offload:
    """The tensors saved for backward, moved to the host and back before backward needs them.

    A storage is moved once, however many of its views are saved. It is copied when the operation that saved
    it is done, and freed when the copy is, with as many bytes on their way as the largest storage has. When
    backward reads a storage, those that were saved before it begin to come back: always the next, or, if it
    `is_tight`, only as many as fit beside the working set of the largest storage. Small tensors, tensors on
    another device, those in `stay` (parameters and buffers), and parts of a larger tensor that needs no
    gradient, such as rows of the batch, are never moved.
    """

    most = 0  # the most bytes that waited in host memory in one forward of this process; a reader resets it

    def __init__(self, stay: Iterable[Tensor], *, is_tight: bool = False) -> None:
        self._stay = {private.storage_key(tensor) for tensor in stay}
        self._is_tight, self._largest, self._sent = is_tight, 0, 0
        self._links: dict[torch.device, HostLink] = {}
        self._known: WeakValueDictionary[Key, _Moved] = WeakValueDictionary()
        self._order: list[ReferenceType[_Moved]] = []
        self._new: list[tuple[int, ReferenceType[_Moved]]] = []  # with the number of the operation
        self._leaving: list[ReferenceType[_Moved]] = []  # being copied to the host
        self._coming: dict[_Moved, tuple[Tensor, Any]] = {}  # came back, and not yet used
        self._last: Tensor | None = None  # the last that was used

    @contextmanager
    def saving(self, kind: str) -> Generator[None]:
        """Move what is saved inside on devices of this kind."""
        try:
            with saved_tensors_hooks(partial(self._pack, kind), self._unpack):
                yield
        finally:
            self._send(inf)

    def close(self) -> None:
        """Free storages that came back unused, once their copies are done."""
        for moved, (_, mark) in self._coming.items():
            self._link(moved.device).wait(mark)
        self._coming.clear()
        self._last = None

    def _is_moved(self, tensor: Tensor, kind: str) -> bool:
        return (
            tensor.device.type == kind
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and SMALLEST
            <= tensor.untyped_storage().nbytes()
            <= (inf if tensor.requires_grad else tensor.nbytes)
            and private.storage_key(tensor) not in self._stay
        )

    @private.not_compiled  # a compiled block calls it, and is not to be compiled with it
    def _pack(self, kind: str, tensor: Tensor) -> Tensor | Saved:
        self.close()  # of an interrupted backward
        operation = private.operations()
        if not self._is_moved(tensor, kind):
            self._send(operation)
            return tensor.detach()  # itself, it would keep a graph alive that no backward frees
        # A storage written to meanwhile is moved again.
        key = (private.storage_key(tensor), private.version(tensor), tensor.dtype)
        moved = self._known.get(key)
        if moved is None or moved.storage() is None:
            while self._order and self._order[-1]() is None:
                self._order.pop()
            # The whole storage, on one axis.
            storage = tensor.untyped_storage()
            numbers = storage.nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((numbers,), (1,), 0)
            moved = _Moved(len(self._order), tensor.device, key[1], ref(storage), source=flat, host=flat)
            self._known[key], self._largest = moved, max(self._largest, flat.nbytes)
            self._order.append(ref(moved))
            self._new.append((operation, ref(moved)))
        self._send(operation)
        return moved, tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def _send(self, operation: float) -> None:
        """Copy what was saved before this operation, which may itself still fill what it saved (RReLU)."""
        while self._new and self._new[0][0] < operation:
            moved = self._new.pop(0)[1]()
            if moved is not None:
                self._sent = moved.host.nbytes + (self._sent if moved.place else 0)
                Offload.most = max(Offload.most, self._sent)
                with moving():
                    moved.host, moved.mark = self._link(moved.device).away(moved.host)
                self._leaving.append(ref(moved))
        alive = [moved for moved in (each() for each in self._leaving) if moved is not None]
        num_bytes = sum(moved.host.nbytes for moved in alive)
        while alive and (num_bytes > self._largest or alive[0].mark is None):
            moved = alive.pop(0)
            num_bytes -= moved.host.nbytes
            self._link(moved.device).wait(moved.mark)
            moved.look()
            moved.source = None
        self._leaving = [ref(moved) for moved in alive]

    @private.not_compiled  # a compiled block calls it, and is not to be compiled with it
    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        moved, size, stride, offset = saved
        return self._take(moved).as_strided(size, stride, offset)

    def _bring(self, moved: _Moved) -> None:
        self._coming[moved] = self._link(moved.device).back(moved.host, moved.device)

    def _bring_ahead(self, moved: _Moved) -> None:
        """Start to bring back what was saved before a storage."""
        ahead = sum(flat.nbytes for one, (flat, _) in self._coming.items() if one is not moved)
        widest = moved.host.nbytes
        for each in self._order[max(0, moved.place - _AHEAD) : moved.place][::-1]:
            one = each()
            if one is None:
                continue
            widest = max(widest, one.host.nbytes)
            if one.source is None and one.taken() is None and one not in self._coming:
                ahead += one.host.nbytes
                room = (self._largest - widest) // 2 if self._is_tight else self._largest
                if ahead > room:
                    return
                self._bring(one)

    def _take(self, moved: _Moved) -> Tensor:
        moved.look()
        if moved.is_changed:  # autograd itself would have refused it
            raise PlanError(
                "Expected what is saved for backward to stay as it is, got a tensor that was changed in "
                f"place after a block had saved it ({moved.host.nbytes} bytes). Change a copy of it."
            )
        # The operation before it often saved the same storage, so the last one is kept until another comes.
        self._last = there = moved.taken() if moved.source is None else moved.source
        if there is None and moved not in self._coming:
            self._bring(moved)
        self._bring_ahead(moved)
        if there is None:
            self._last, mark = self._coming.pop(moved)
            self._link(moved.device).wait(mark)
            moved.taken = ref(self._last)
        return cast("Tensor", self._last)

    def _link(self, device: torch.device) -> HostLink:
        if device not in self._links:
            self._links[device] = StreamLink(device) if accelerator.has_streams(device) else HostLink()
        return self._links[device]
