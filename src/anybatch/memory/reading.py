"""The peak memory of a stretch of code, read while it runs, at little cost."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Set
from functools import cache, partial
from typing import Any

import torch

from anybatch.core import accelerator, tensors_in, torch_private as private

_MARK = 12_347  # bytes: an allocation of this size marks the end of the forward in the events
_ALLOWANCE = 1.25  # factor if nodes of the graph are not seen
_open = threading.Lock()  # one reading at a time


class MemoryReading:
    """The largest number of bytes held above the level at `begin`, by tensors and kernels' workspaces.

    On the CPU it uses torch's profiler without operators (allocations of the thread; some 15 us and, at the
    end, 2.3 to 2.9 KB per event), and at `mark` adds other memory of malloc, such as nodes of the graph. On
    accelerators it uses the allocators' statistics, added up, and resets their peaks; if there are none, it
    follows the storages that operations return. Then, and without glibc, it adds a quarter to the bytes seen
    (`is_exact` is False). Bytes that an allocator reserved and did not use count: a limit counts them. For
    that the cache is freed first. End it in the thread that began it.
    """

    def __init__(self, start: "_Start", devices: Set[torch.device], *, is_exact: bool) -> None:
        """Use `begin`."""
        self.events, self.is_exact = 0, is_exact  # allocations and releases; all bytes were seen
        self.allocated = self.unused = 0  # bytes of all tensors of the devices at the peak; reserved beside
        self._devices = devices
        self._in_use, self._at_mark = held_by_malloc(), 0
        self._stop: Callable[[], list[int] | None] | None = start()

    @classmethod
    def begin(cls, devices: Iterable[torch.device | str]) -> "MemoryReading | None":
        """Start a reading; return None if another one or a profiler is open."""
        found = {torch.device(one) for one in devices}
        if not _open.acquire(blocking=False):
            return None
        reading = None
        try:
            if any(one.type != "cpu" for one in found):
                if accelerator.in_use() is not None:
                    accelerator.free_cache()
                    is_counted = all(accelerator.forget_peak(one) is not None for one in found)
                    start = _start_statistics if is_counted else Following
                    reading = cls(partial(start, found), found, is_exact=is_counted)
            elif not private.is_profiling() and _has_events():
                reading = cls(private.start_memory_events, set(), is_exact=_mallinfo() is not None)
        finally:
            if reading is None:
                _open.release()
        return reading

    def mark(self) -> None:
        """Note that the forward has ended: all nodes of the graph exist now."""
        self._at_mark = held_by_malloc()
        torch.UntypedStorage(_MARK)  # no operation: modes of the caller do not see it

    def end(self) -> tuple[int, int] | None:
        """Return peak bytes and the bytes that are left; None if nothing was read.

        A reading is lost if it was closed, or if another profiler took over.
        """
        if self._stop is None:
            return None
        try:
            sizes = self._stop()
        finally:
            self._stop = None
            _open.release()
        if sizes is None:
            return None
        for device in self._devices if self.is_exact else ():
            self.allocated += accelerator.peak_bytes(device) or 0
            self.unused += accelerator.peak_unused(device)
        level = peak = besides = 0
        for size in sizes:
            if abs(size) != _MARK:
                level += size
                peak = max(peak, level)
            elif self._at_mark:
                besides = max(0, self._at_mark - self._in_use - level)
        self.events = len(sizes)
        peak += besides + self.unused
        return int(peak if self.is_exact else _ALLOWANCE * peak), max(0, level)


# Starts a source, and returns a function that stops it and returns the changes in bytes, or their peak.
_Start = Callable[[], Callable[[], list[int] | None]]


def _start_statistics(devices: Iterable[torch.device]) -> Callable[[], list[int]]:
    before = {one: accelerator.allocated(one) for one in devices}

    def changes() -> list[int]:
        peak = sum((accelerator.peak_bytes(one) or 0) - held for one, held in before.items())
        left = sum(accelerator.allocated(one) - held for one, held in before.items())
        return [peak, left - peak]

    return changes


class Following(private.TorchDispatchMode):
    """The beginnings and ends of the storages that operations return, in bytes; called, it ends."""

    def __init__(self, devices: Set[torch.device]) -> None:
        super().__init__()
        self._devices, self._changes = devices, list[int]()
        self._followed: dict[int, weakref.ref[Any]] = {}
        self.__enter__()

    def __call__(self) -> list[int]:
        """End it, and return the changes in order."""
        self.__exit__(None, None, None)
        return self._changes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(one) for _, one in _storages((args, kwargs))}
        for device, storage in _storages(result):
            key, size = id(storage), storage.nbytes()
            if device in self._devices and not (key in given or key in self._followed):
                self._changes.append(size)
                self._followed[key] = weakref.ref(storage, partial(self._end, key, size))
        return result

    def _end(self, key: int, size: int, _: object) -> None:
        del self._followed[key]
        self._changes.append(-size)


def _storages(nest: Any) -> list[tuple[torch.device, torch.UntypedStorage]]:
    found = [one for one in tensors_in(nest) if one.layout is torch.strided]
    return [(one.device, one.untyped_storage()) for one in found]


class _MallInfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


@cache
def _mallinfo() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = _MallInfo
    return function


def held_by_malloc() -> int:
    """Return the bytes that malloc has given out in this process; 0 without glibc."""
    function = _mallinfo()
    found = function() if function else None
    return found.field7 + found.field4 if found else 0  # in the arenas, and mapped


@cache
def _has_events() -> bool:
    """Return True if torch's allocation events work here. The first call also sets the profiler up."""
    name = "KINETO_LOG_LEVEL"
    is_ours = name not in os.environ
    os.environ.setdefault(name, "99")  # read at the first use; without it, every use prints two lines
    try:
        stop = private.start_memory_events()
        torch.UntypedStorage(_MARK)
        return stop() == [_MARK, -_MARK]
    except (AttributeError, TypeError, RuntimeError):
        return False
    finally:
        if is_ours:
            del os.environ[name]
