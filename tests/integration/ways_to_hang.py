"""Ways in which a worker hangs, for the tests and for benchmarks/hanging.py."""

from __future__ import annotations

import ctypes
import os
import tempfile


def loop_for_ever() -> None:
    while True:
        pass


def keep_the_lock() -> None:
    """Keeps the interpreter's lock in C."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.usleep(600_000_000)


def read_from_nobody() -> None:
    path = os.path.join(tempfile.mkdtemp(), "fifo")
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # else to open it would block
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    os.read(descriptor, 1)


HANGS = {"loop": loop_for_ever, "lock": keep_the_lock, "read": read_from_nobody}
