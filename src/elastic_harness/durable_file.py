"""Files that a crash leaves old or new, never half of each.

A file is written under a temporary name and synced. Then it gets its name, and the folder is synced. So a reader finds
either the old file or the new one: also after the writer was killed between any two system calls, on a full disk, and
after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from elastic_harness.errors import InfrastructureError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name. The file that is written there becomes `path` when the block ends. If the block raises,
    `path` is as it was and the temporary file is gone. It may be a folder too, if `path` does not exist yet. Raises
    OSError."""
    with _beside(path) as temporary:
        yield temporary
        rename(temporary, path)


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """Do as `replacing`, but keep a file that is there already, perhaps made by another process. Raises OSError."""
    with _beside(path) as temporary:
        yield temporary
        sync(temporary)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        sync(path.parent)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a temporary name, and remove afterwards what is still there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)


RESUME = "start again with the same run folder to resume"


def write(path: Path, content: bytes, then: str = RESUME) -> None:
    """Replace a small file. Raises InfrastructureError; `then`: what to do once it can be written."""
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise cannot_write(path, error, then) from error


def rename(temporary: Path, path: Path) -> None:
    """Give a complete file its name, durably. Raises OSError."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` have left beside it. Only its single writer may call
    this: a second writer would lose the file that it is writing, and fail."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk. If the file system cannot sync folders, go on without."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError, then: str = RESUME) -> InfrastructureError:
    """Return the error for a write that the disk refuses, with what to do then."""
    return InfrastructureError(
        f"cannot write {path}: {error.strerror or error}; free space or make the folder writable, then {then}"
    )
