"""Single key presses from a terminal, without waiting for Enter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from types import TracebackType


class Keys:
    """Context: while inside, `pressed()` returns keys as they come; outside a terminal it returns none.

    The terminal's settings are put back on leaving, whatever happened inside. Ctrl-C stays an interrupt.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._saved: list[object] | None = None

    def __enter__(self) -> Keys:
        with contextlib.suppress(ImportError, OSError, ValueError):
            import termios
            import tty

            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor) and os.getpgrp() == os.tcgetpgrp(descriptor):
                self._saved = termios.tcgetattr(descriptor)
                tty.setcbreak(descriptor)
                self._descriptor = descriptor
        return self

    @property
    def available(self) -> bool:
        return self._descriptor is not None

    def pressed(self) -> str:
        """The keys pressed since the last call, possibly none; never blocks."""
        if self._descriptor is None or not select.select([self._descriptor], [], [], 0)[0]:
            return ""
        return os.read(self._descriptor, 64).decode(errors="ignore")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._descriptor is not None and self._saved is not None:
            import termios

            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._saved)  # type: ignore[arg-type]
            self._descriptor = None
