"""What a worker is doing right now, in a page of memory shared with its agent, which reads it even after a death."""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum

_BOARD = struct.Struct("<QqqqqdQ")


class Phase(IntEnum):
    STARTING = 0
    DATA = 1
    SLOT = 2
    EXCHANGE = 3
    APPLY = 4
    RECOVERY = 5
    USER = 6
    CHECKPOINT = 7
    FINISHED = 8
    WAITING = 9


class Board:
    """Writer side. `show` costs about a microsecond; without an agent it goes to memory nobody reads."""

    def __init__(self, descriptor: int | None) -> None:
        if descriptor is None:
            self._page = mmap.mmap(-1, mmap.PAGESIZE)
        else:
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
            os.close(descriptor)
        self._beat = 0
        self.generation = 0
        self.phase = Phase.STARTING
        self.step = -1
        self.slot = -1
        self.samples: list[int] = []  # of the slot; for error reports, not on the page

    def show(self, phase: Phase, step: int = -1, slot: int = -1, deadline_s: float = 0.0) -> None:
        """Enter a phase. `deadline_s`: how long it may last before the agent takes the worker for hung (0: any)."""
        self._beat += 1
        self.phase, self.step, self.slot = phase, step, slot
        _BOARD.pack_into(
            self._page, 0, self._beat, self.generation, phase, step, slot, time.time(), int(deadline_s * 1000)
        )
