"""The process that takes snapshots from the node's shared memory to disk, as its agent sees it: started with the first
worker that needs it, restarted when it dies, waited for at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.contract import memory_slots
from elastic_harness.contract.checkpoint_event import CheckpointEvent

RESTART_DELAYS_S = (0.0, 0.2, 1.0, 5.0)  # after so many deaths in a row; the last for all further ones


class WriterProcess:
    """`report(event, fields)` is called with what the writer says. `slots`: descriptors of the shared memory; `lock`:
    of the run folder's lock, which the writer holds until everything is on disk."""

    def __init__(
        self, run_dir: Path, slots: Sequence[int], lock: int | None, report: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._run_dir = run_dir
        self._slots = list(slots)
        self._wake = memory_slots.wake_descriptor()
        self._lock = lock
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._starts = 0
        self._deaths = 0
        self._finishing = False
        self.pidfd = -1

    @property
    def for_workers(self) -> list[int]:
        """The descriptors that a worker needs: the slots, and what wakes the writer."""
        return [*self._slots, self._wake]

    @property
    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def output(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self) -> None:
        """Start it. Raises OSError."""
        self._starts += 1
        folder, name = self._run_dir / "checkpoints", f"writer-{self._starts}"
        with (self._run_dir / "logs" / "checkpoint-writer.log").open("ab") as log:
            self._process = memory_slots.start_writer(folder, self._slots, self._wake, self._lock, name, stderr=log)
        self.pidfd = os.pidfd_open(self._process.pid)

    def pump(self) -> bool:
        """Pass on what it has said; call when its output is readable. False at its end."""
        data = os.read(self.output, 1 << 16)
        self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                said = CheckpointEvent.from_line(line)
                self._deaths = 0
                self._report(said.event, said.fields)
        return bool(data)

    def reap(self) -> float | None:
        """After its end: the delay after which to start it again, None if it was asked to end."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        os.close(self.pidfd)
        if self._finishing:
            return None
        delay_s = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S) - 1)]
        self._deaths += 1
        self._report("checkpoint_writer_died", {"exit_code": code, "restart_in_s": delay_s})
        return delay_s

    def finish(self) -> None:
        """Ask it to bring everything to its end, and to end."""
        self._finishing = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        self._finishing = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._wake)
