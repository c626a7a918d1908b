"""An index in object storage or behind HTTP, read in verified chunks that are kept in a bounded folder on local disk.

A chunk is a file in that folder. It is written under a temporary name and renamed, so that any number of processes can
share it. Each process checks its hash when it first uses the chunk. A wrong chunk is fetched again, and reported if it
is still wrong then.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.object_store import ObjectStore

FETCHES_AT_ONCE = 16
READ_AHEAD_CHUNKS = 64  # at most so many are fetched before they are needed
HELD_CHUNKS = 256  # at most so many are mapped into this process
TRIES = 3
SWEEP_PART = 16  # the folder is swept each time that 1/16 of its limit was added
Int64s = npt.NDArray[np.int64]


class RemoteFile:
    """One object, read by byte ranges. Raises the errors of ObjectStore."""

    def __init__(self, url: str) -> None:
        self.url = url
        folder, _, self._name = url.rpartition("/")
        self._store = ObjectStore(folder)

    def size(self) -> int:
        return self._store.size(self._name)

    def read(self, low: int, high: int) -> bytes:
        return self._store.read(self._name, low, high)


@dataclass(frozen=True)
class ChunkLayout:
    """How the file is cut into chunks. Chunk i is bytes low + i·size to low + (i + 1)·size, and not beyond high."""

    low: int
    high: int
    size: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Return the bounds of all chunks."""
        return map(self.bounds, range(-(-(self.high - self.low) // self.size)))

    def bounds(self, chunk: int) -> tuple[int, int]:
        start = self.low + chunk * self.size
        return start, min(start + self.size, self.high)


class ChunkCache:
    """The verified chunks of one file. folder: on local disk, shared by all processes that read this file. limit_bytes:
    of the folder. The chunks that were not used for longest are removed first."""

    def __init__(
        self, file: RemoteFile, layout: ChunkLayout, hashes: npt.NDArray[np.uint64], folder: Path, limit_bytes: int
    ) -> None:
        self._file = file
        self._layout = layout
        self._hashes = hashes
        self._folder = folder
        self._limit = limit_bytes
        self._held: OrderedDict[int, npt.NDArray[np.uint8]] = OrderedDict()
        self._coming: dict[int, Future[npt.NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()
        self._added = limit_bytes  # so that the first fetch looks through the folder
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InfrastructureError(
                f"The cache of {file.url} cannot be written: {error}; set XDG_CACHE_HOME to a writable folder."
            ) from error

    def read(self, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the file from low to high, as an array that may be a view of the cache."""
        self._check_fork()
        first, last = self._chunk_of(low), self._chunk_of(high - 1)
        if first == last:
            start, _ = self._layout.bounds(first)
            return self._chunk(first)[low - start : high - start]
        pieces = []
        for chunk in range(first, last + 1):
            start, end = self._layout.bounds(chunk)
            pieces.append(self._chunk(chunk)[max(low, start) - start : min(high, end) - start])
        return np.concatenate(pieces)

    def prefetch(self, ranges: list[tuple[int, int]]) -> None:
        """Begin to fetch the chunks of these byte ranges, unless too many are on their way already."""
        self._check_fork()
        wanted = dict.fromkeys(
            chunk for low, high in ranges for chunk in range(self._chunk_of(low), self._chunk_of(high - 1) + 1)
        )
        for chunk in wanted:
            with self._lock:
                if len(self._coming) >= READ_AHEAD_CHUNKS:
                    return
                if chunk in self._held or chunk in self._coming:
                    continue
                self._coming[chunk] = coming = self._executor().submit(self._take_up, chunk)
            coming.add_done_callback(lambda done, chunk=chunk: self._arrived(chunk, done))  # type: ignore[misc]

    def _chunk_of(self, byte: int) -> int:
        return (byte - self._layout.low) // self._layout.size

    def _chunk(self, chunk: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            if chunk in self._held:
                self._held.move_to_end(chunk)
                return self._held[chunk]
            coming = self._coming.get(chunk)
        if coming is not None:
            return coming.result()
        content = self._take_up(chunk)
        self._hold(chunk, content)
        return content

    def _arrived(self, chunk: int, done: Future[npt.NDArray[np.uint8]]) -> None:
        """Keep a chunk that was fetched ahead. A chunk that could not be fetched is asked for again, and reported, when
        it is needed."""
        if done.exception() is None:
            self._hold(chunk, done.result())
        with self._lock:
            self._coming.pop(chunk, None)

    def _hold(self, chunk: int, content: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._held[chunk] = content
            while len(self._held) > HELD_CHUNKS:
                self._held.popitem(last=False)

    def _take_up(self, chunk: int) -> npt.NDArray[np.uint8]:
        """Return a chunk from the folder if it is there and right, else from the storage. Runs in any thread."""
        low, high = self._layout.bounds(chunk)
        path = self._folder / str(chunk // 1000) / f"{chunk}.chunk"
        with contextlib.suppress(OSError, ValueError):
            found = np.memmap(path, np.uint8, mode="r")
            if len(found) == high - low and self._right(chunk, found):
                os.utime(path)
                return found
        for _ in range(TRIES):
            content = self._file.read(low, high)
            if self._right(chunk, content):
                return self._keep(path, content)
            seen = f"{xxhash.xxh3_64_hexdigest(content)} in place of {int(self._hashes[chunk]):016x}"
        raise InfrastructureError(
            f"Bytes {low} to {high} of {self._file.url} are damaged: {TRIES} times they came with the hash {seen}. The "
            "object itself is wrong; upload the index again."
        )

    def _right(self, chunk: int, content: Any) -> bool:
        return xxhash.xxh3_64_intdigest(content) == int(self._hashes[chunk])

    def _keep(self, path: Path, content: bytes) -> npt.NDArray[np.uint8]:
        """Write a chunk into the folder, and return it. If there is no room, the chunk is used all the same."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(content)
            kept: npt.NDArray[np.uint8] = np.memmap(temporary, np.uint8, mode="r")
            os.replace(temporary, path)
        except OSError:
            kept = np.frombuffer(content, np.uint8)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        with self._lock:
            self._added += len(content)
            full = self._added * SWEEP_PART >= self._limit
            self._added = 0 if full else self._added
        if full:
            self._sweep()
        return kept

    def _sweep(self) -> None:
        """Remove the chunks that were not used for longest, and leave room for those that come until the next sweep."""
        found = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit - self._limit // SWEEP_PART:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="index-read-ahead")
        return self._pool

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            raise ConfigError(
                f"{self._file.url} was opened before this process was forked, and connections do not survive that. Use "
                "num_workers=0, or a DataLoader with multiprocessing_context='spawn'."
            )
