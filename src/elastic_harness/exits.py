"""What the end of a process says. Exit codes are told apart here and nowhere else. Pure."""

from __future__ import annotations

import signal
from enum import Enum

from elastic_harness.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, EXIT_SUCCESS


class Exit(Enum):
    SUCCESS = "it ended without an error"
    ERROR = "its own code failed"
    CONFIG = "its configuration is wrong"
    MACHINE = "the machine failed it"
    ABORTED = "it gave up: a library of its process called abort()"
    CRASHED = "native code did what the processor or the kernel does not allow"
    ENDED = "somebody asked it to end"
    KILLED = "somebody, or the kernel for memory, killed it"
    SIGNAL = "another signal ended it"
    RELAYED = "a shell says that its child was killed"

    @property
    def by_signal(self) -> bool:
        return self in _SIGNALS

    @property
    def explains_others(self) -> bool:
        """Whether this end is not the consequence of another worker's end. A worker that lost a peer ends with an
        error, or with an abort in a library's thread. It is never killed by that, and does not blame the
        configuration."""
        return self in (Exit.CONFIG, Exit.RELAYED) or (self.by_signal and self is not Exit.ABORTED)


_SIGNALS = {Exit.ABORTED, Exit.CRASHED, Exit.ENDED, Exit.KILLED, Exit.SIGNAL}
_BY_CODE = {
    EXIT_SUCCESS: Exit.SUCCESS,
    EXIT_CONFIG: Exit.CONFIG,
    EXIT_INFRASTRUCTURE: Exit.MACHINE,
    **{128 + number: Exit.RELAYED for number in (signal.SIGKILL, signal.SIGTERM)},
    -signal.SIGABRT: Exit.ABORTED,
    -signal.SIGKILL: Exit.KILLED,
    **{-number: Exit.CRASHED for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)},
    **{-number: Exit.ENDED for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)},
}


def read_exit(code: int | None) -> Exit:
    """Return what an exit code says. It is negative for a signal. None: it is not known, which counts as killed."""
    if code is None:
        return Exit.KILLED
    return _BY_CODE.get(code) or (Exit.ERROR if code > 0 else Exit.SIGNAL)
