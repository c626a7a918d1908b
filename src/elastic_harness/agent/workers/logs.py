"""A worker's output: read from a pipe, kept whole in its own file, and shown line by line."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

TAIL_LINES = 30
_LONGEST_LINE_BYTES = 16384


class WorkerLog:
    """The reading end of one worker's stdout and stderr. A full disk stops the file, never the worker."""

    def __init__(self, path: Path, name: str, show: Callable[[str, bytes], None]) -> None:
        self.path = path
        self.write_error = ""
        self._name = name
        self._show = show
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def pump(self, bytes_max: int = 1 << 20) -> bool:
        """Read what has been written so far (at most about `bytes_max`). Return False at the end of the stream."""
        taken = 0
        while self.read_end >= 0 and taken < bytes_max:
            try:
                data = os.read(self.read_end, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            taken += len(data)
            self._keep(data)
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._line(line)
            if len(self._partial) > _LONGEST_LINE_BYTES:
                self._line(self._partial)
                self._partial = b""
        return self.read_end >= 0

    def tail(self, count: int = 10) -> list[str]:
        """Return the last lines that are not empty."""
        return list(self._tail)[-count:]

    def close(self) -> None:
        if self._partial:
            self._line(self._partial)
            self._partial = b""
        self.close_write_end()
        for descriptor in (self.read_end, self._file):
            if descriptor >= 0:
                os.close(descriptor)
        self.read_end = self._file = -1

    def _keep(self, data: bytes) -> None:
        try:
            while data and not self.write_error:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, "?")
            self.write_error = f"{self.path}: {error.strerror} ({reason}); later output of this worker is not kept"
            self._show(self._name, self.write_error.encode())

    def _line(self, line: bytes) -> None:
        text = line.rstrip(b"\r")
        if text.strip():
            self._tail.append(text.decode(errors="replace")[:2000])
        self._show(self._name, text)
