"""Accelerators: memory, caches, streams, random streams and backends, for every kind of device"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from anybatch.core import torch_private as private

MATMUL: Any = torch.backends.cuda.matmul  # switches of matrix products, on ROCm as well


def module_of(kind: str | torch.device) -> Any:
    """Return the module of a kind of device, such as `torch.cuda`; None if it has none."""
    return getattr(torch, torch.device(kind).type, None)


def built() -> str | None:
    """Return the kind of accelerator that torch was built for, such as "cuda"; None without one."""
    try:
        found = torch.accelerator.current_accelerator()  # costs a microsecond, and initializes nothing
    except RuntimeError:  # torch 2.6, where there is none
        return None
    return None if found is None else found.type


def find() -> str | None:
    """Return the kind of the accelerator that this machine has; None without one."""
    return built() if torch.accelerator.is_available() else None


def in_use() -> Any:
    """Return the module of the accelerator if the process has begun to use it; else None."""
    kind = built()
    if kind is None:
        return None
    module = module_of(kind)
    return module if getattr(module, "is_initialized", torch.accelerator.is_available)() else None


def generators() -> Sequence[torch.Generator]:
    """Return the default random generators of the accelerator's devices; none before its first use."""
    if built() is None:  # asked in every step
        return ()
    module = in_use()
    return () if module is None else private.default_generators(module)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default random generator of a device."""
    found = () if device.type == "cpu" else generators()
    return found[device.index or 0] if found else torch.default_generator


def free_cache() -> None:
    """Give unused memory of the accelerator's allocator back."""
    getattr(in_use(), "empty_cache", tuple)()


def _told(device: torch.device, name: str) -> Any:
    """Return what this function of a device's module tells of it; None if there is none, as on a CPU."""
    read = getattr(module_of(device), name, None)
    return None if read is None else read(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of the bytes allocated on a device; None if they are not counted, as on a CPU."""
    return _told(device, "max_memory_allocated")


def peak_unused(device: torch.device) -> int:
    """Return the peak of the bytes reserved, which a limit counts, less that of the bytes allocated."""
    peak = _told(device, "max_memory_reserved")
    return 0 if peak is None else peak - (peak_bytes(device) or 0)


def reserved(device: torch.device) -> int:
    """Return the bytes that the allocator of a device holds; 0 if they are not counted."""
    return _told(device, "memory_reserved") or 0


def allocated(device: torch.device) -> int:
    """Return the bytes allocated on a device; 0 if they are not counted."""
    return _told(device, "memory_allocated") or 0


def forget_peak(device: torch.device) -> int | None:
    """Begin a new peak of a device; return the bytes allocated now, None if they are not counted."""
    try:
        module_of(device).reset_peak_memory_stats(device)
    except (AttributeError, RuntimeError):  # not counted by this kind, or by this allocator
        return None
    return allocated(device)


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of a device that are free or held by torch, and all of its bytes; None if unknown."""
    module = module_of(device)
    try:
        if hasattr(module, "recommended_max_memory"):  # MPS
            total = module.recommended_max_memory()
            return total - module.driver_allocated_memory() + module.current_allocated_memory(), total
        free, total = module.mem_get_info(device)
    except (AttributeError, RuntimeError):  # not told by this kind, or by this driver
        return None
    return free + reserved(device), total


@contextmanager
def capped(device: torch.device, num_bytes: int) -> Generator[bool]:
    """Make the allocator of a device refuse more than so many bytes for a while; yield False if it cannot."""
    module, found = module_of(device), free_and_total(device)
    if found is None or not hasattr(module, "get_per_process_memory_fraction"):
        yield False
        return
    # torch wants a number here
    index = module.current_device() if str(device) == device.type else device.index
    before = module.get_per_process_memory_fraction(index)
    module.set_per_process_memory_fraction(min(1.0, num_bytes / found[1]), index)
    try:
        yield True
    finally:
        module.set_per_process_memory_fraction(before, index)


def widest(device: torch.device) -> torch.dtype:
    """Return the floating dtype of the most digits that a device computes in."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(value: torch.Tensor) -> torch.Tensor:
    """Return a value with as many digits as its device has, so that few operations round, or none."""
    return value.to(widest(value.device))


def name_of(device: torch.device) -> str:
    """Return the name of the card, or the kind of device where it has none."""
    return _told(device, "get_device_name") or device.type


def has_streams(device: torch.device) -> bool:
    """Return True if copies may run beside the computation of a device."""
    return device.type != "cpu" and hasattr(module_of(device), "Stream")


@contextmanager
def on_stream(stream: torch.Stream) -> Generator[None]:
    """Run operations on a stream for a while."""
    on_device = getattr(module_of(stream.device), "device", nullcontext)  # `set_stream` moves to its device
    with on_device(stream.device):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
