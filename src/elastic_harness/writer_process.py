"""Watches over the writer, the process that takes snapshots from shared memory to disk. The agent of a node does so, or
a script without an agent.

    start → pump what it says → reap → start again after a pause, until it is over

Whatever ends a writer, another one takes over, so the snapshots in memory still come to disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_harness import processes
from elastic_harness.contract import shared_frames, variables
from elastic_harness.contract.checkpoint_event import CheckpointEvent

RESTART_DELAYS_S = (0.0, 0.2, 1.0, 5.0)  # after the first, second, … death in a row; the last for all further ones
DEATHS_MAX = 5  # in a row; after more, a script that waits for a checkpoint is told that it will not come
LONG_LIFE_S = 600.0  # the death of a writer that lived so long begins a new row
STOPPED_S = 5.0  # a writer that was stopped (SIGSTOP) for so long is killed


def restart_delay_s(deaths: int, *, finishing: bool) -> float | None:
    """Return the pause before another writer is started, when so many have died in a row; None: start none. While
    training goes on there is always another one, because the cause may go away. At the end nobody waits for ever."""
    if finishing and deaths > DEATHS_MAX:
        return None
    return RESTART_DELAYS_S[min(deaths, len(RESTART_DELAYS_S)) - 1]


@dataclass(frozen=True)
class WriterCommand:
    """The facts with which a writer is started."""

    folder: Path  # where checkpoints go
    frames: Sequence[int]  # descriptors of the shared memory
    wake: int  # the eventfd that says there is something to do
    lock: int | None = None  # a descriptor that the writer holds until everything is on disk
    log: Path | None = None  # the file for its standard error; None: the same as this process
    keep: str | None = None  # the key under which the memory is kept for the next job if this process dies
    copies: Sequence[int] = ()  # descriptors of other ranks' snapshots, which are kept too

    def spawn(self, name: str) -> subprocess.Popen[bytes]:
        """Start a writer. Raises OSError."""
        command = [sys.executable, "-m", "elastic_harness.checkpoint.writer", "--folder", str(self.folder.absolute())]
        command += ["--frames", shared_frames.to_text(self.frames), "--wake", str(self.wake)]
        if self.lock is not None:
            command += ["--lock", str(self.lock)]
        if self.keep is not None:
            command += ["--keep", self.keep, "--copies", shared_frames.to_text(self.copies)]
        with contextlib.ExitStack() as opened:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self.log is None else opened.enter_context(self.log.open("ab")),
                pass_fds=[*self.frames, *self.copies, self.wake, *([] if self.lock is None else [self.lock])],
                start_new_session=True,
                env={**os.environ, variables.MEMBER: name},
            )


class WriterProcess:
    """One writer after the other. `report(event, fields)` is called for each event that a writer tells, and for its
    death. For one thread.

    `restart_in_s`: the caller calls `start` after so long; None if a writer runs, or no other is needed."""

    def __init__(self, command: WriterCommand, report: Callable[[str, dict[str, Any]], None]) -> None:
        self._command = command
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._starts = 0
        self._started_at = 0.0
        self._stopped_at: float | None = None
        self._deaths = 0
        self._finishing = self._killed = False
        self._last_word = b""
        self.restart_in_s: float | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    @property
    def output(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def over(self) -> bool:
        """Whether the writer was asked to end, and has ended: everything is done, or no writer can do it."""
        return self._finishing and not self.running and self.restart_in_s is None

    @property
    def trouble(self) -> str:
        """Why nothing comes to disk, in words; "" while a writer runs, or may still do it."""
        if self.running or self._deaths <= DEATHS_MAX:
            return ""
        return (
            f"The process that writes checkpoints died {self._deaths} times in a row; see what it said, or run `dmesg` "
            "for the kernel's reasons. Training state is unharmed."
        )

    def start(self) -> bool:
        """Start a writer, or note that this failed. Return whether one runs."""
        self._starts += 1
        self._started_at, self._stopped_at, self._partial = time.monotonic(), None, b""
        try:
            self._process = self._command.spawn(f"writer-{self._starts}")
        except OSError as error:
            self._died(None, f"cannot be started: {error.strerror or error}")
            return False
        self.restart_in_s = None
        if self._finishing:
            self._say_last_word()
        return True

    def pump(self) -> bool:
        """Pass on the events that the writer has told. Call this when its output is readable. Return False at the
        output's end."""
        data = os.read(self.output, 1 << 16)
        self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            try:
                said = CheckpointEvent.from_line(line)
            except ValueError:
                continue
            if said.event == "checkpoint_saved":
                self._deaths = 0
            self._report(said.event, said.fields)
        return bool(data)

    def reap(self) -> None:
        """Note how the writer ended, and whether another one has to be started. Call this after its output's end."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        if not self._killed and (code != 0 or not self._finishing):
            self._died(code, self._how_it_ended(code))

    def check_stopped(self) -> None:
        """Kill the writer if somebody has stopped it (SIGSTOP) for STOPPED_S: others wait for it, and another one can
        do its work. Call this about once a second."""
        if self._process is None or processes.stat(self._process.pid).state != "T":
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = time.monotonic()
        elif time.monotonic() - self._stopped_at >= STOPPED_S:
            self._process.kill()

    def finish(self, *, keep: bool = False) -> None:
        """Ask the writer to do all that is left, and to end. `keep`: the memory is then kept for the next job. If the
        writer has died, another one does this: see `restart_in_s`."""
        self._finishing, self._last_word = True, b"keep\n" if keep else b"done\n"
        if self._process is not None:
            self._say_last_word()
        elif self.restart_in_s is not None:
            self.restart_in_s = 0.0

    def kill(self) -> None:
        """Kill the writer at once, and start no other."""
        self._finishing = self._killed = True
        self.restart_in_s = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _say_last_word(self) -> None:
        """Write the last word to the writer's input. To close the input is not enough: another process that was forked
        from this one may hold it open."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), self._last_word)

    def _how_it_ended(self, code: int) -> str:
        stopped = "stopped, and then " if self._stopped_at is not None else ""
        return f"was {stopped}killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _died(self, code: int | None, how: str) -> None:
        if time.monotonic() - self._started_at > LONG_LIFE_S:
            self._deaths = 0
        self._deaths += 1
        self.restart_in_s = restart_delay_s(self._deaths, finishing=self._finishing)
        then = "no other is started, what was not written is lost"
        if self.restart_in_s is not None:
            then = f"another is started in {self.restart_in_s:g} s"
        error = f"the process that writes checkpoints {how}; {then}"
        self._report("checkpoint_writer_died", {"exit_code": code, "restart_in_s": self.restart_in_s, "error": error})
