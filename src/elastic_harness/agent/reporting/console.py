"""The user's view while a job runs: worker lines with their prefix, and the agent's own notices.

A write never blocks the agent. If the reader is slower than the workers, lines are dropped and the reader is told how
many. They stay in the log files.
"""

from __future__ import annotations

import os

_BUFFER_BYTES_MAX = 1 << 20
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


class Console:
    """Non-blocking, line-wise output on a pipe that belongs to this process alone."""

    def __init__(self, descriptor: int, *, colour: bool, quiet: bool) -> None:
        self.descriptor = descriptor
        self.quiet = quiet
        self._colour = colour
        self._buffer = bytearray()
        self._dropped = 0
        self._closed = False
        os.set_blocking(descriptor, False)

    @property
    def pending(self) -> bool:
        return bool(self._buffer) and not self._closed

    def worker_line(self, name: str, line: bytes) -> None:
        """Show one line of a worker's output, unless quiet."""
        if self.quiet:
            return
        prefix = f"[{name}] "
        if self._colour:
            prefix = f"\x1b[{_COLOURS[int(name[1:]) % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._put(prefix.encode() + line + b"\n", may_drop=True)

    def notice(self, text: str) -> None:
        """Show a notice of the agent."""
        prefix = "\x1b[1m[agent]\x1b[0m " if self._colour else "[agent] "
        for line in text.splitlines():
            self._put(f"{prefix}{line}\n".encode(errors="backslashreplace"), may_drop=False)

    def block(self, text: str) -> None:
        """Show a block of text as it is."""
        self._put(text.encode(errors="backslashreplace") + b"\n", may_drop=False)

    def flush(self) -> None:
        """Write as much as the reader takes now."""
        try:
            while self._buffer and not self._closed:
                del self._buffer[: os.write(self.descriptor, self._buffer[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:
            self._closed = True
            self._buffer.clear()

    def drain(self) -> None:
        """Write everything, and wait for the reader. Only at the end."""
        if not self._closed:
            os.set_blocking(self.descriptor, True)
            self.flush()

    def _put(self, data: bytes, *, may_drop: bool) -> None:
        if self._closed:
            return
        if may_drop and len(self._buffer) > _BUFFER_BYTES_MAX:
            self._dropped += 1
            return
        if self._dropped and may_drop:
            self._buffer += f"[agent] {self._dropped} lines were not shown (see the log files)\n".encode()
            self._dropped = 0
        self._buffer += data
        self.flush()
