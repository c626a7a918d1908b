"""A child that another process has forked, and how a child is tied to its parent's life."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signal_number: int) -> None:
    """Let the kernel send this process a signal when its parent's thread ends. For use between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal_number)


class Process:
    """A child of this process that another one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has ended, negative for a signal."""
        if self._exit_code is None:
            self._reap(os.WNOHANG)
        return self._exit_code

    def wait(self) -> int:
        """Block until it has ended; returns its exit code."""
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
