"""For commands that go on beside a job until it ends, or until they are asked to end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from elastic_harness.errors import InfrastructureError

END_S = 10.0  # for metrics and trackers to write what there is


@contextlib.contextmanager
def asked_to_end() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that the block can finish what it does. Call it in the main
    thread."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # `run_beside` had it wait until somebody listens
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def run_beside(*words: str) -> Iterator[None]:
    """Run one of our commands beside the block, and ask it to end with it. Raises InfrastructureError if it cannot be
    started; what it does then is no matter of the block's."""
    command, nothing = [sys.executable, "-m", "elastic_harness", *words], subprocess.DEVNULL
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the command inherits it
    try:
        process = subprocess.Popen(command, stdin=nothing, stdout=nothing, start_new_session=True)
    except OSError as error:
        raise InfrastructureError(f"cannot start `elastic-harness {words[0]}`: {error.strerror or error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with ended_after(process, END_S):
        yield


@contextlib.contextmanager
def ended_after(process: subprocess.Popen[bytes], within_s: float) -> Iterator[None]:
    """Ask a process to end after the block, and kill it if it takes longer."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
