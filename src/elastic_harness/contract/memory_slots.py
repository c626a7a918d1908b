"""The shared memory that outlives a node's workers, before anything is in it: who starts the processes makes it, and
hands its descriptors down, to the writer too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from elastic_harness.contract import variables

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


def start_writer(
    folder: Path,
    slots: Sequence[int],
    wake: int,
    lock: int | None,
    name: str,
    stderr: IO[bytes] | None = None,
    *,
    keep: str | None = None,
    copies: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start the process that takes snapshots from the slots to `folder`. It ends when its standard input does, and says
    on its standard output what it did. `lock`: a descriptor that it keeps until everything is on disk. `keep`:
    the key under which the slots, and those with `copies`, are kept for the next job if this process dies. Raises
    OSError."""
    command = [sys.executable, "-m", "elastic_harness.checkpoint.writer", "--folder", str(folder.absolute())]
    command += ["--slots", to_text(slots), "--wake", str(wake)]
    if lock is not None:
        command += ["--lock", str(lock)]
    if keep is not None:
        command += ["--keep", keep, "--copies", to_text(copies)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        pass_fds=[*slots, *copies, wake, *([] if lock is None else [lock])],
        start_new_session=True,
        env={**os.environ, variables.MEMBER: name},
    )
