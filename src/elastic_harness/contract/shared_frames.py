"""The shared memory that outlives a node's workers, before anything is in it: who starts the processes makes it, and
hands its descriptors down, to the writer too."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

FRAMES = 2  # snapshots that are kept at once
LEDGER_AT = 512  # where a snapshot says which attempt waits for the ledger, and the agent that it need not
_WORD = struct.Struct("<Q")


def create() -> list[int]:
    """Descriptors of empty frames, which only processes that are given them inherit."""
    return [os.memfd_create(f"snapshot-{number}", os.MFD_CLOEXEC) for number in range(FRAMES)]


def wake_descriptor() -> int:
    """An eventfd with which anyone wakes the writer."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def to_text(descriptors: Sequence[int]) -> str:
    return ",".join(map(str, descriptors))


def from_text(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def note_ledger(descriptors: Sequence[int], attempt: int) -> None:
    """As the agent: say that the ledger has all steps before this snapshot, if it is still here."""
    for descriptor in descriptors:
        waiting = os.pread(descriptor, _WORD.size, LEDGER_AT)
        if waiting == _WORD.pack(attempt):
            os.pwrite(descriptor, waiting, LEDGER_AT + _WORD.size)
