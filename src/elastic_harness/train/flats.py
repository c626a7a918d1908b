"""Reused flat vectors, the size of the whole gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_harness.train.layout import Layout


class FlatPool:
    """Fresh memory costs a page fault per 4 KiB, so vectors are reused. After a failure none comes back: work that
    is still pending may hold it. `pin`: page-locked host memory, for fast copies from and to a GPU."""

    def __init__(self, layout: Layout, device: torch.device, *, pin: bool) -> None:
        self._layout = layout
        self._device = device
        self._pin = pin
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(self._layout.elements, dtype=self._layout.dtype, device=self._device, pin_memory=self._pin)

    def give_back(self, *flats: Tensor) -> None:
        self._free.extend(flats)
