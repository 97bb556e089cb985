"""Offload: tensors that blocks save for backward wait in host memory"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anybatch.core import PlanError, accelerator, moving, tensors_in, torch_private as private

#: Smaller tensors stay on the device: the latency of a copy is longer than its transfer.
SMALLEST = 64 * 1024

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


def _nothing() -> None:
    """Return None, as a dead weak reference."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Moved:
    device: torch.device
    version: int  # of the source when it was saved
    source: Tensor | None  # the storage on the device, until its copy is done
    host: Tensor  # its copy; the source itself until the block ends
    mark: Any = None  # when the copy is done
    taken: Callable[[], Tensor | None] = _nothing  # the storage that came back, while it is used
    is_changed: bool = False  # True if the source was written to before it left

    def look(self) -> None:
        """Check if the source was written to, which the copy may or may not have seen."""
        if self.source is not None and private.version(self.source) != self.version:
            self.is_changed = True


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Visit:
    """One call of a block of any policy."""

    before: "Callable[[], Visit | None]"  # the call that backward reaches next, if alive
    moved: list[ReferenceType[_Moved]] = field(default_factory=list[ReferenceType[_Moved]])

    def alive(self) -> list[_Moved]:
        """Return the storages that autograd still holds."""
        return [moved for moved in (each() for each in self.moved) if moved is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A tensor that autograd saved: a view of a moved storage."""

    moved: _Moved
    visit: Visit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """The saved tensors of blocks, moved to the host and back before backward needs them.

    A storage is moved once, however many of its views are saved. While a block computes, the storages of the
    block before it are copied; when backward enters a block, those of the block before it begin to come back.
    Blocks without offload take part, so that the memory of an offloaded one does not depend on them. Small
    tensors, tensors on another device and those in `stay` (parameters and buffers) are never moved.
    """

    def __init__(self, stay: Iterable[Tensor]) -> None:
        self._stay = {private.storage_key(tensor) for tensor in stay}
        self._links: dict[torch.device, HostLink] = {}
        self._coming: dict[_Moved, tuple[Tensor, Any]] = {}  # came back, and not yet used
        self._last: Callable[[], Visit | None] = _nothing  # in forward
        self._entered: Callable[[], Visit | None] = _nothing  # in backward

    @contextmanager
    def saving(self, kind: str) -> Generator[Visit]:
        """Run one call of a block, which it yields; nothing is moved if `kind` is empty."""
        self.close()  # of an interrupted backward
        before = self._last()
        visit = Visit(self._last)
        known: dict[Key, _Moved] = {}
        hooks = saved_tensors_hooks(partial(self._pack, kind, visit, known), self._unpack)
        try:
            with hooks if kind else nullcontext():
                yield visit
        finally:
            known.clear()  # autograd holds it
        # Copy after the block: an operation may fill a tensor after saving it (nn.RReLU's noise).
        for moved in visit.alive():
            with moving():
                moved.host, moved.mark = self._link(moved.device).away(moved.host)
        for moved in before.alive() if before is not None else ():
            if moved.source is not None:
                self._link(moved.device).wait(moved.mark)
                moved.look()
                moved.source = None
        self._last = ref(visit)

    def watch(self, visit: Visit, outputs: Any) -> None:
        """Bring back the storages of the block before this one when backward reaches these outputs."""
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                output.grad_fn.register_hook(partial(self._enter, visit))

    def close(self) -> None:
        """Free storages that came back unused, once their copies are done."""
        for moved, (_, mark) in self._coming.items():
            self._link(moved.device).wait(mark)
        self._coming.clear()

    def _is_moved(self, tensor: Tensor, kind: str) -> bool:
        return (
            tensor.device.type == kind
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= SMALLEST
            and private.storage_key(tensor) not in self._stay
        )

    @private.not_compiled  # a compiled block calls it, and is not to be compiled with it
    def _pack(self, kind: str, visit: Visit, known: dict[Key, _Moved], tensor: Tensor) -> Tensor | Saved:
        if not self._is_moved(tensor, kind):
            return tensor
        # The storage lives until `known` is cleared, so its key is unique. A storage written to meanwhile is
        # moved again.
        key = (private.storage_key(tensor), private.version(tensor), tensor.dtype)
        moved = known.get(key)
        if moved is None:
            # The whole storage, on one axis.
            numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((numbers,), (1,), 0)
            moved = known[key] = _Moved(tensor.device, key[1], source=flat, host=flat)
            visit.moved.append(ref(moved))
        return Saved(moved, visit, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @private.not_compiled  # a compiled block calls it, and is not to be compiled with it
    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._enter(saved.visit)
        return self._take(saved.moved).as_strided(saved.size, saved.stride, saved.offset)

    def _enter(self, visit: Visit, *gradients: object) -> None:
        if self._entered() is not visit:
            self._entered = ref(visit)
            before = visit.before()
            for moved in (*visit.alive(), *(before.alive() if before is not None else ())):
                self._bring(moved)

    def _bring(self, moved: _Moved) -> None:
        if moved.source is None and moved.taken() is None and moved not in self._coming:
            self._coming[moved] = self._link(moved.device).back(moved.host, moved.device)

    def _take(self, moved: _Moved) -> Tensor:
        moved.look()
        if moved.is_changed:  # autograd itself would have refused it
            raise PlanError(
                "Expected what is saved for backward to stay as it is, got a tensor that was changed in "
                f"place after a block had saved it ({moved.host.nbytes} bytes). Change a copy of it."
            )
        there = moved.taken() if moved.source is None else moved.source
        if there is not None:
            return there
        self._bring(moved)
        flat, mark = self._coming.pop(moved)
        self._link(moved.device).wait(mark)
        moved.taken = ref(flat)
        return flat

    def _link(self, device: torch.device) -> HostLink:
        if device not in self._links:
            self._links[device] = StreamLink(device) if accelerator.has_streams(device) else HostLink()
        return self._links[device]
