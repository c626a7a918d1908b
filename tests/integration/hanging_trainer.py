"""The observed trainer, with further actions for its failpoints: ways in which a worker hangs. With BLOCK_STACKS in the
environment all its threads block the signal with which the agent asks for stacks."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile

import observed_trainer

from elastic_harness import failpoints
from elastic_harness.contract.board import STACKS_SIGNAL


def loop_for_ever() -> None:
    while True:
        pass


def keep_the_lock() -> None:
    """Keeps the interpreter's lock in C."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.usleep(600_000_000)


def read_from_nobody() -> None:
    path = os.path.join(tempfile.mkdtemp(), "fifo")
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # else to open it would block
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    os.read(descriptor, 1)


HANGS = {"loop": loop_for_ever, "lock": keep_the_lock, "read": read_from_nobody}


def main() -> None:
    act = failpoints._act

    def hang_or_act(action: str, place: str, step: int | None) -> None:
        if action not in HANGS:
            act(action, place, step)
            return
        os.write(2, f"failpoint {place} (step {step}): {action}\n".encode())
        HANGS[action]()

    failpoints._act = hang_or_act
    if "BLOCK_STACKS" in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
    observed_trainer.main()


if __name__ == "__main__":
    main()
