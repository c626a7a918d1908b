"""The shared memory that outlives a node's workers, before anything is in it: who starts the processes makes it, and
hands its descriptors down, to the writer too."""

from __future__ import annotations

import os
from collections.abc import Sequence

SLOTS = 2  # snapshots that are kept at once


def create() -> list[int]:
    """Descriptors of empty slots, which only processes that are given them inherit."""
    return [os.memfd_create(f"snapshot-{number}", os.MFD_CLOEXEC) for number in range(SLOTS)]


def wake_descriptor() -> int:
    """An eventfd with which anyone wakes the writer."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def to_text(descriptors: Sequence[int]) -> str:
    return ",".join(map(str, descriptors))


def from_text(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
