"""A child that another process has forked."""

from __future__ import annotations

import os
import signal


class Process:
    """A child of this process that another process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code once the process has ended, negative for a signal; None before."""
        if self._exit_code is None:
            self._reap(os.WNOHANG)
        return self._exit_code

    def wait(self) -> int:
        """Block until the process has ended, and return its exit code."""
        while self._exit_code is None:
            self._reap(0)
        return self._exit_code

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:
            self._exit_code = -signal.SIGKILL  # somebody else has reaped it
            return
        if pid:
            self._exit_code = os.waitstatus_to_exitcode(status)
