"""Files that a crash leaves old or new, never half of each.

A file is written under a temporary name and synced; it gets its name, and the folder is synced. So a reader finds
what was there before or what was to be there, also after the writer was killed between any two system calls, on a
full disk, and after a power cut.
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
    """Yield a temporary name; the file that is written there becomes `path` when the block ends. If the block raises,
    `path` is as it was and the temporary file is gone. A folder will do too where `path` is not there yet. Raises
    OSError."""
    with _beside(path) as temporary:
        yield temporary
        rename(temporary, path)


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """As `replacing`, but a file that another process has made meanwhile stays. Raises OSError."""
    with _beside(path) as temporary:
        yield temporary
        sync(temporary)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        sync(path.parent)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary name, which is gone afterwards."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def write(path: Path, content: bytes) -> None:
    """Replace a small file. Raises InfrastructureError."""
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise cannot_write(path, error) from error


def rename(temporary: Path, path: Path) -> None:
    """Give a file that is complete its name, durably. Raises OSError."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what writers of `path` that were killed have left beside it. For its only writer: a second one would lose
    the file that it is writing, and fail."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk. A file system that cannot sync folders is taken as it is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> InfrastructureError:
    """What a disk that refuses means for a run, in words."""
    return InfrastructureError(
        f"cannot write {path}: {error.strerror or error}; free space or make the folder writable, then start again "
        "with the same run folder to resume"
    )
