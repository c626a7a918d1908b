"""A folder that belongs to one job at a time. A lock file names the holder, and the lock never outlives its holders."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from elastic_harness.errors import ConfigError, InfrastructureError


def take(path: Path, busy: str, wait_s: float = 60.0) -> int:
    """Lock a file, and return the lock's descriptor. The file and its folder are created if they are missing. The lock
    is held as long as any process keeps the descriptor open. If the process that took the lock has ended, the others
    are about to let go, and this call waits for them up to `wait_s`.

    Raises ConfigError with the text `busy` ({holder} in it stands for the process id) if another job has the lock, and
    InfrastructureError if the file cannot be used."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InfrastructureError(
            f"cannot use the folder {path.parent}: {error.strerror}; choose another one or make it writable"
        ) from error
    give_up_at = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
            if _lives(holder) or time.monotonic() > give_up_at:
                os.close(descriptor)
                raise ConfigError(busy.format(holder=holder or "unknown")) from None
            time.sleep(0.05)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise InfrastructureError(f"cannot write {path}: {error.strerror}; free space and try again") from error
    return descriptor


def _lives(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
