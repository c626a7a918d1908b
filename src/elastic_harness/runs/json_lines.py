"""Files of JSON objects, one a line. A line is appended whole or not at all. Files are read past damage, from either
end.

A writer that is killed leaves at most a torn last line, which the next writer cuts off. A line may be no JSON object,
because a power cut or another program damaged it. Readers say so, and nothing but that line is lost.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness import durable_file
from elastic_harness.shape import parse

BLOCK_BYTES = 1 << 16


class Appender:
    """Appends to such a file, from any thread. No other process may write it. A line for which `append` has returned
    survives the death of any process, and after `sync` a power cut."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. A torn last line is cut off first. Raises InfrastructureError."""
        self.path = path
        self._lock = threading.Lock()  # a thread that takes back a part of its line must not take another's line
        try:
            there = path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                self._cut(_whole_bytes(self._descriptor))
                if not there:
                    durable_file.sync(path.parent)
            except OSError:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise durable_file.cannot_write(path, error) from error

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one line, and return its length in bytes. Raises InfrastructureError if it cannot be written whole;
        nothing of it is in the file then."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._write(line)
        except OSError as error:
            raise durable_file.cannot_write(self.path, error) from error
        return len(line)

    def sync(self) -> None:
        """Bring everything that was appended to disk. Raises InfrastructureError."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise durable_file.cannot_write(self.path, error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: bytes) -> None:
        """Write a line. A disk that fills up takes the first part of it and refuses the rest. If that part cannot be
        taken back, the file takes no more lines, because the next one would be lost with it."""
        before, written = os.fstat(self._descriptor).st_size, 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            try:
                self._cut(before)
            except OSError:
                self.close()
            raise

    def _cut(self, size: int) -> None:
        if os.fstat(self._descriptor).st_size > size:
            os.ftruncate(self._descriptor, size)


@dataclass(frozen=True)
class Line:
    """A whole line of a file: where it is, and its object, or why there is none."""

    begin: int
    end: int
    record: dict[str, Any] | None
    damage: str = ""


def read(path: Path, begin: int = 0) -> Iterator[Line]:
    """Yield every whole line, from the one that begins at an offset. A torn last line is left out."""
    with open(path, "rb") as file:
        file.seek(begin)
        for text in file:
            if not text.endswith(b"\n"):
                return
            yield _line(path, begin, text)
            begin += len(text)


def read_backwards(path: Path) -> Iterator[Line]:
    """Yield the same lines, the newest first. Read about as much of the file as the caller asks for."""
    with open(path, "rb") as file:
        end, rest = _whole_bytes(file.fileno()), b""  # rest: the bytes after `end` of a line that begins before it
        while end > 0:
            begin = max(0, end - max(BLOCK_BYTES, len(rest)))
            text = os.pread(file.fileno(), end - begin, begin) + rest
            lines = [line + b"\n" for line in text.split(b"\n")[:-1]]
            rest = lines.pop(0) if begin > 0 else b""
            at = begin + len(text)
            for line in reversed(lines):
                at -= len(line)
                yield _line(path, at, line)
            end = begin


def read_at(path: Path, begin: int) -> Line:
    """Return the line that begins at an offset."""
    with open(path, "rb") as file:
        file.seek(begin)
        return _line(path, begin, file.readline())


def torn(path: Path) -> bool:
    """Return whether the file ends in a part of a line. Then its writer is writing, or was killed."""
    with open(path, "rb") as file:
        return _whole_bytes(file.fileno()) < os.fstat(file.fileno()).st_size


def _line(path: Path, begin: int, text: bytes) -> Line:
    end = begin + len(text)
    try:
        record = parse(text)
    except ValueError as error:
        return Line(begin, end, None, f"{path} at byte {begin}: not JSON ({error})")
    if not isinstance(record, dict):
        return Line(begin, end, None, f"{path} at byte {begin}: {type(record).__name__} in place of a JSON object")
    return Line(begin, end, record)


def _whole_bytes(descriptor: int) -> int:
    """Return how many bytes of a file are whole lines."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
