"""The board: 64 bytes that a worker writes and its agent reads at any time, also after the worker's death."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

BOARD_BYTES = 4096
_LAYOUT = struct.Struct("<QqqqqdQ")

STARTING, DATA, SLOT, EXCHANGE, APPLY, RECOVERY, IDLE, CHECKPOINT, FINISHED, WAITING = range(10)
PHASES = (
    "starting",
    "loading data",
    "computing a slot",
    "exchanging gradients",
    "applying the step",
    "recovering",
    "user code between steps",
    "saving a checkpoint",
    "finished",
    "waiting for a generation",
)


@dataclass(frozen=True)
class Reading:
    """What a worker last said about itself. `deadline_ms` 0 means: no deadline in this phase."""

    beat: int
    generation: int
    phase: int
    step: int
    slot: int
    since: float
    deadline_ms: int

    @property
    def phase_name(self) -> str:
        return PHASES[self.phase] if 0 <= self.phase < len(PHASES) else f"phase {self.phase}"

    @property
    def where(self) -> str:
        """Where in its work the worker is, in words."""
        parts = [self.phase_name]
        if self.phase == SLOT and self.slot >= 0:
            parts[0] = f"computing slot {self.slot}"
        if self.phase in (DATA, SLOT, EXCHANGE, APPLY, RECOVERY, IDLE, CHECKPOINT):
            parts.append(f"step {self.step}")
        return ", ".join(parts)


class Board:
    """The agent's side of one worker's board; `descriptor` is what the worker inherits."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"elastic-harness-board-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, BOARD_BYTES)
        self._memory = mmap.mmap(self.descriptor, BOARD_BYTES)

    def read(self) -> Reading:
        return Reading(*_LAYOUT.unpack_from(self._memory, 0))

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
