"""Out of memory, in the words of every allocator; and what its error held is let go."""

import pytest
import torch

from anybatch.core.oom import ran_out_of_memory

WORDS = """[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory
DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.
std::bad_alloc
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
CUDA error: out of memory
HIP out of memory. Tried to allocate 1 GiB
MPS backend out of memory (MPS allocated: 1 GB)
XPU out of memory.
Invalid buffer size: 19.38 GiB
Command buffer failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)
Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)
NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)
NPU function error: error code is 207001 [Error]: Failed to apply for memory.
could not create a memory object
could not create a primitive
Unable to allocate 1.00 GiB for an array with shape (2,)"""
OUT: list[BaseException] = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    OSError(12, "Cannot allocate memory"),
    *map(RuntimeError, WORDS.splitlines()),
]
OTHER: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),
    KeyboardInterrupt(),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many registers"),
    RuntimeError("could not create a primitive descriptor for an LSTM forward propagation primitive"),
    RuntimeError("replay memory: unable to allocate slot 7 of 8"),
]


@pytest.mark.parametrize("error", OUT, ids=str)
def test_lack_of_memory_is_recognised(error: BaseException) -> None:
    assert ran_out_of_memory(error)
    outer = ValueError("in a layer")
    outer.__cause__ = error
    assert ran_out_of_memory(outer)


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    outer = ValueError("in a layer")
    outer.__cause__, error.__cause__ = error, outer  # a circle of causes ends
    assert not ran_out_of_memory(error)
