"""Out of memory: recognised in all its forms, and what can be freed at once."""

import gc
import re
import traceback

import torch

# What allocators, and libraries that allocate, say. In lower case; an error must hold one of them.
_SAYINGS = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "out of memory",  # CUDA, HIP, MPS, XPU, cuDNN and the operating system
    "cublas_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "hipblas_status_alloc_failed",
    "rocblas_status_memory_error",
    "miopenstatusallocfailed",
    "cannot allocate memory",
    "could not create a memory",  # oneDNN; so is the next one
    "could not create a primitive",
    "failed to allocate memory",
    "out_of_device_memory",  # XPU
    "out_of_host_memory",
)
_NUMPYS = re.compile(r"unable to allocate [\d.]+ ?([kmgtpe]i?)?b")  # a slot or a port may be allocated, too


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or the one that it was raised from, says that memory ran out.

    Args:
        error: what was caught. Only errors of memory, of the system and `RuntimeError` are looked at, so that
            a text about memory in any other is not taken for one.

    Example:
        >>> ran_out_of_memory(MemoryError()), ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
        (True, True)
        >>> ran_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
        True
        >>> ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(one, RuntimeError | OSError) and _says_so(str(one).lower()):
            return True
        one = one.__cause__
    return False


def _says_so(text: str) -> bool:
    text = text.replace("primitive descriptor", "")  # oneDNN: this dtype is not supported
    return any(word in text for word in _SAYINGS) or _NUMPYS.search(text) is not None


def released(error: BaseException) -> str:
    """What the allocator said, in one line; what the error's frames hold is let go.

    A traceback keeps the variables of every function it went through alive, and so the activations.

    Example:
        >>> def fill():
        ...     held = bytearray(8)
        ...     raise MemoryError("no room\\nfor 8 bytes")
        >>> try:
        ...     fill()
        ... except MemoryError as error:
        ...     released(error)
        'MemoryError: no room'
    """
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return said


def free_caches() -> None:
    """Free what nobody holds any more: cycles, what autocast has cast, and the allocator's reserve."""
    torch.clear_autocast_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
