"""Memory that runs out in a slot: which errors say so, what can be freed, and how full everything was."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import time
from typing import Any

import torch

from elastic_harness.memory_pools import oom_kill_counter, read_own_limits, read_pools, resident_bytes

_MESSAGES = (  # of plain RuntimeErrors; other allocations of CUDA raise torch.OutOfMemoryError
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be allocated, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def free_unused() -> None:
    """Give back all memory that nothing refers to any more: Python's, torch's on the GPU, the C library's."""
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # the driver itself may be out of memory
            torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def memory_now() -> dict[str, Any]:
    """Return how full the memory is that this process may use, and how often the kernel has ended a process for it."""
    now_s = time.monotonic()
    pools = [*read_pools(now_s), *read_own_limits(now_s)]
    held: dict[str, Any] = {
        "resident_bytes": resident_bytes(),
        "pools": {each.pool: [each.used_bytes, each.limit_bytes] for each in pools},
        "oom_kills": oom_kill_counter(),
    }
    if torch.cuda.is_initialized():
        held["cuda_allocated_bytes"] = torch.cuda.memory_allocated()
        held["cuda_reserved_bytes"] = torch.cuda.memory_reserved()
    return held
