"""One file of tensors: plain safetensors, written past the page cache in large pieces, read and checked block by block.

A slice of one piece is an entry under its own name. A larger slice is several one-dimensional entries `name#0`,
`name#1`, ….
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from elastic_harness.failpoints import failpoint

BUFFER_BYTES = 16 << 20
PAGE = 4096  # of O_DIRECT; the tensors' bytes begin at a multiple of it
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A block to be written: its name in the file, its safetensors type, its shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: memoryview


@dataclass(frozen=True)
class Written:
    """What `write` has made: where each entry's bytes begin, the file's size, and the size and hash of its header."""

    begins: list[int]
    nbytes: int
    header_bytes: int
    header_hash: str


def hash_of(content: memoryview | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def write(path: Path, entries: Iterable[TensorEntry]) -> Written:
    """Write a new file and return once its content is on disk. Raises OSError; the file may then be partial.

    It is always a new file. Writing over an old file would be faster on some disks. But a process may have mapped the
    old file, and no call tells that on every file system (decision 0023).
    """
    listed = list(entries)
    header: dict[str, object] = {}
    position, begins = 0, []
    for entry in listed:
        end = position + len(entry.content)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        begins.append(position)
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-(len(text) + 8) % PAGE)  # the format allows blanks, and says how long the header is
    start = struct.pack("<Q", len(text)) + text
    writer = _Writer(path)
    try:
        writer.write(memoryview(start))
        for entry in listed:
            writer.write(entry.content)
        nbytes = writer.finish()
    finally:
        writer.close()
    return Written([len(start) + begin for begin in begins], nbytes, len(start), hash_of(start))


def read(descriptor: int, begin: int, into: memoryview) -> None:
    """Fill `into` from a place of the file. Raises EOFError if the file is too short."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], begin + done)
        if count == 0:
            raise EOFError
        done += count


class _Writer:
    """Appends through an aligned buffer, past the page cache if the file system allows that."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
            self._descriptor = os.open(path, flags, 0o644)
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)
        self._filled = 0
        self._written = 0

    def write(self, content: memoryview) -> None:
        if self._filled == 0 and len(content) % PAGE == 0 and _address(content) % PAGE == 0:
            self._pwrite(content)  # without a copy
            return
        while len(content):
            part = content[: BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._flush(BUFFER_BYTES)

    def finish(self) -> int:
        """Write the rest, cut off its padding, wait for the disk, and return the size."""
        size = self._written + self._filled
        if self._filled:
            padded = self._filled + -self._filled % PAGE
            self._buffer[self._filled : padded] = bytes(padded - self._filled)
            self._flush(padded)
        os.ftruncate(self._descriptor, size)
        failpoint("checkpoint.syncing")
        os.fsync(self._descriptor)
        return size

    def close(self) -> None:
        os.close(self._descriptor)
        self._buffer.close()

    def _flush(self, count: int) -> None:
        with memoryview(self._buffer) as whole, whole[:count] as content:
            self._pwrite(content)
        self._filled = 0

    def _pwrite(self, content: memoryview) -> None:
        failpoint("checkpoint.writing")
        done = 0
        while done < len(content):
            try:
                with content[done:] as rest:
                    written = os.pwrite(self._descriptor, rest, self._written)
                done += written
                self._written += written
            except OSError as error:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _address(content: memoryview) -> int:
    """Return the address of these bytes in memory."""
    return int(np.frombuffer(content, np.uint8).__array_interface__["data"][0]) if len(content) else 0
