"""The shared memory that outlives a node's workers, before anything is in it. The process that starts the workers
creates it, and hands its descriptors down to them and to the writer."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

FRAMES = 2  # snapshots that are kept at once
LEDGER_AT = 512  # a snapshot says there which attempt waits for the ledger, and the agent that it need not wait
_WORD = struct.Struct("<Q")


def create() -> list[int]:
    """Return descriptors of empty frames. Only processes that are given them inherit them."""
    return [os.memfd_create(f"snapshot-{number}", os.MFD_CLOEXEC) for number in range(FRAMES)]


def wake_descriptor() -> int:
    """Return an eventfd with which any process wakes the writer."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def to_text(descriptors: Sequence[int]) -> str:
    return ",".join(map(str, descriptors))


def from_text(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def note_ledger(descriptors: Sequence[int], attempt: int) -> None:
    """Note, as the agent, that the ledger has all steps before this snapshot, if the snapshot is still here."""
    for descriptor in descriptors:
        waiting = os.pread(descriptor, _WORD.size, LEDGER_AT)
        if waiting and _WORD.unpack(waiting) == (attempt,):
            os.pwrite(descriptor, waiting, LEDGER_AT + _WORD.size)
