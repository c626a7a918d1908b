"""Reads how full the GPU is that this process uses."""

from __future__ import annotations

import torch

from elastic_harness.health.memory import MemoryReading


def read_gpu(now_s: float) -> list[MemoryReading]:
    """Return a reading of this process's current GPU; none if it has used no GPU. What torch has reserved and can hand
    out again does not count as used. Asks the driver, and does not wait for the GPU's work."""
    if not torch.cuda.is_initialized():
        return []
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return [MemoryReading(now_s, f"GPU {device}", total - free - spare, total)]
