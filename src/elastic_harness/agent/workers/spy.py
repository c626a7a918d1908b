"""Asks py-spy for the stacks of a worker that cannot write them itself: one that is stopped, or blocks the signal.

py-spy (https://github.com/benfred/py-spy) reads another process's memory and does not pause it. It is used where it is
installed, beside this Python or on the PATH. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ANSWER_S_MAX = 0.5
_HEAD = "(most recent call first):"  # as faulthandler has it


def program() -> str | None:
    """Return where py-spy is; None if it is not installed."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


class Spy:
    """One py-spy, at one process."""

    def __init__(self, path: str, pid: int) -> None:
        self._told = tempfile.TemporaryFile()
        command = [path, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._told, stderr=subprocess.DEVNULL
            )

    def over(self) -> bool:
        """Return whether it has ended."""
        return self._process is None or self._process.poll() is not None

    def stacks(self) -> list[str]:
        """Return the stacks that it has told, in faulthandler's words, the main thread last; none if it could not read
        them, or has not ended."""
        if not self.over():
            return []
        self._told.seek(0)
        try:
            threads = sorted(json.load(self._told), key=lambda thread: thread["thread_name"] == "MainThread")
            return [line for thread in threads for line in _thread(thread)]
        except (ValueError, LookupError, TypeError):  # it was refused, or speaks in other words
            return []

    def end(self) -> None:
        """Kill it, if it has not ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._told.close()


def _thread(thread: dict[str, object]) -> list[str]:
    frames: list[dict[str, object]] = thread["frames"]  # type: ignore[assignment]
    shown = [f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}' for frame in frames]
    return [f"Thread {thread['thread_id']} {_HEAD}", *shown]
