"""Signals that ask a process to stop: a handler that only sets a flag."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from elastic_harness import processes
from elastic_harness.errors import ConfigError


class StopSignals:
    """Notes signals from `install` to `restore`. A handler that the script had installed is called as well. A second
    SIGINT does what it did before, so two Ctrl-C end a process that does not look at the flag.

    A process that was forked meanwhile has these handlers too. There a SIGTERM does what it did before, so that
    `multiprocessing` can end its workers. Other signals are left to the parent: Ctrl-C, and what Slurm sends, come to
    all processes of a job.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._previous: dict[int, Any] = {}
        self._installed_by = 0  # a process id
        self._received: list[str] = []
        self._taken = 0

    def install(self) -> None:
        """Install the handlers. A signal that is ignored stays ignored (nohup, a shell's background jobs). Raises
        ConfigError outside the main thread, and for a handler that could not be put back."""
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "Python lets only the main thread handle signals; enter the FaultDetector there, or set "
                "fault_detector.signals=()."
            )
        caught = processes.caught_signals(os.getpid())
        for number in self._numbers:
            previous = signal.getsignal(number)
            by_others = previous is signal.SIG_DFL and caught >> number - 1 & 1  # as faulthandler.register does
            if previous is None or by_others:
                raise ConfigError(
                    f"{number.name} has a handler that was not installed by Python's signal module, so it could not be "
                    "put back; leave it out of fault_detector.signals."
                )
        self._installed_by = os.getpid()
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back the handlers that were there. One that was installed on top of ours stays, and ours does nothing
        but pass signals on."""
        self._installed_by = 0
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    @property
    def received(self) -> bool:
        """Whether a signal came."""
        return bool(self._received)

    def take_new(self) -> list[str]:
        """Return the names of the signals that came since the last call, in their order."""
        new = self._received[self._taken :]
        self._taken += len(new)
        return new

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        again = name in self._received
        if self._installed_by == os.getpid() or (self._installed_by and number != signal.SIGTERM):
            self._received.append(name)
            previous = self._previous[number]
            interrupts = previous is signal.default_int_handler
            if callable(previous) and (again or not interrupts):
                previous(number, frame)
        else:
            _do(self._previous[number], number, frame)


def _do(action: Callable[[int, FrameType | None], Any] | int, number: int, frame: FrameType | None) -> None:
    """Do with a signal what this action says."""
    if callable(action):
        action(number, frame)
    elif action == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
