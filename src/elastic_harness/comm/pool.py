"""Reused vectors, for what is sent and received at every step."""

from __future__ import annotations

import torch
from torch import Tensor


class Pool:
    """Vectors that are reused, because fresh memory costs a page fault per 4 KiB. After a failure no vector comes back:
    work that is still pending may use it. `pin`: page-locked host memory, for fast copies from and to a GPU."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, pin: bool = False) -> None:
        self._dtype = dtype
        self._device = device
        self._pin = pin
        self._free: dict[int, list[Tensor]] = {}

    def take(self, elements: int) -> Tensor:
        """Return a vector of so many elements, with arbitrary content."""
        free = self._free.get(elements)
        if free:
            return free.pop()
        return torch.empty(elements, dtype=self._dtype, device=self._device, pin_memory=self._pin)

    def give_back(self, *vectors: Tensor) -> None:
        """Take back whole vectors that `take` returned and nobody uses any more."""
        for vector in vectors:
            self._free.setdefault(vector.numel(), []).append(vector)

    def clear(self) -> None:
        """Forget the free vectors, because sizes change with the membership."""
        self._free.clear()
