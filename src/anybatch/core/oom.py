"""Out of memory: recognized in all its forms, and caches that can be freed."""

import gc
import re
import traceback
from contextlib import suppress

import torch

from anybatch.core import accelerator

# Messages of allocators and of libraries that allocate, in lower case.
_SAYINGS = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "out of memory",  # CUDA, HIP, MPS, XPU, NPU, cuDNN and the operating system
    "cublas_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "hipblas_status_alloc_failed",
    "rocblas_status_memory_error",
    "miopenstatusallocfailed",
    "cannot allocate memory",
    "could not create a memory",  # oneDNN, like the next line
    "could not create a primitive",
    "failed to allocate memory",
    "out_of_device_memory",  # XPU
    "out_of_host_memory",
    "error_out_of_resources",
    "invalid buffer size: ",  # MPS, like the next line
    "insufficient memory (0",
    "failed to apply for memory",  # NPU
)
_NUMPYS = re.compile(r"unable to allocate [\d.]+ ?([kmgtpe]i?)?b")  # a slot or a port may be allocated, too


def mark_final(error: BaseException) -> None:
    """Mark an error that must not be recovered from."""
    vars(error)["is_final"] = True


def is_final(error: BaseException) -> bool:
    """Return True if an error must not be recovered from."""
    return "is_final" in vars(error)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or a cause of it, says that memory ran out, and it is not final."""
    seen: set[int] = set()
    one: BaseException | None = None if is_final(error) else error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(one, RuntimeError | OSError):  # a text about memory in another error does not count
            text = str(one).lower().replace("primitive descriptor", "")  # oneDNN: unsupported dtype
            if any(word in text for word in _SAYINGS) or _NUMPYS.search(text):
                return True
        one = one.__cause__
    return False


def released(error: BaseException) -> str:
    """Return the first line of an error's message; drop its traceback and causes, which hold activations."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return said


def free_caches() -> None:
    """Free reference cycles, the cache of autocast and the unused memory of the accelerator's allocator."""
    torch.clear_autocast_cache()
    gc.collect()
    accelerator.free_cache()


def mark_written(error: BaseException) -> None:
    """Mark an error that came while or after an update was made, so that not all is as before the step."""
    vars(error)["has_written"] = True


def has_written(error: BaseException) -> bool:
    """Return True if an error came while or after an update was made."""
    return "has_written" in vars(error)


def note_update(error: BaseException, update: int) -> None:
    """Note on an error that this update was made before it."""
    mark_written(error)
    note(error, f"Update {update} was made before this error: do not repeat the batch.")


def note(error: BaseException, text: str) -> None:
    """Add a note to an error, unless its class allows none."""
    with suppress(Exception):
        error.add_note(text)
