"""A launched job as the demo and chaos hold it: the public command line in a process, its event log, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elastic_harness.runs.events import EVENTS, EventTail
from elastic_harness.runs.story import Kill, Story

STOP_TIMEOUT_S = 15.0
TAIL_LINES = 40


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived: clean up and leave."""

    @property
    def exit_code(self) -> int:
        return 128 + int(self.args[0])


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that every context cleans up."""

    def leave(number: int, frame: object) -> None:
        raise Terminated(number)

    saved = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


def cli(*arguments: str) -> list[str]:
    """The argument vector of `elastic-harness …`, run by this very interpreter."""
    return [sys.executable, "-m", "elastic_harness", *arguments]


class Job:
    """A launched job; as a context it leaves no process behind, however it is left."""

    def __init__(
        self,
        command: Sequence[str],
        run_dir: Path,
        output: Path,
        max_steps: int,
        workers: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """variables: of its environment, besides those of this process."""
        self.command = list(command)
        self._environment = {**os.environ, **(variables or {})}
        self.run_dir = run_dir
        self.output = output
        self.workers = workers
        self.story = Story(max_steps=max_steps)
        self.kills: list[Kill] = []
        self._tail = EventTail(run_dir / EVENTS)
        self._process: subprocess.Popen[bytes] | None = None
        self._handles: dict[str, int] = {}
        self._launched_at = 0.0

    def __enter__(self) -> Job:
        self._launched_at = time.time()  # earlier launches' process ids may be those of strangers by now
        with open(self.output, "wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def advance(self) -> bool:
        """Take in what the log has new; False once the job has ended and everything it wrote is taken in."""
        ended = self._process is None or self._process.poll() is not None
        for event in self._tail.read():
            self.story.apply(event)
            if event["event"] == "worker_started" and float(event["t"]) >= self._launched_at:
                self._hold(str(event["member"]), int(event["pid"]))
        return not ended

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self, ranks: Sequence[int], t: float, by: str) -> Kill | None:
        """SIGKILL to these ranks of the current generation, at one moment; None if none of them lives."""
        workers = [worker for worker in self.story.up() if worker.rank in ranks]
        struck = [worker for worker in workers if self.signal(worker.member)]
        if not struck:
            return None
        kill = Kill(
            t,
            self.story.running_step,
            tuple(worker.member for worker in struck),
            tuple(worker.rank for worker in struck if worker.rank is not None),
            tuple(worker.pid for worker in struck),
            by,
        )
        self.story.mark_killed(kill)
        self.kills.append(kill)
        return kill

    def stop(self) -> None:
        """End the job: asks first, then kills its process group. Returns when the launch command is gone."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def output_tail(self) -> str:
        """The last lines that the launch command printed."""
        if not self.output.exists():
            return ""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def _hold(self, member: str, pid: int) -> None:
        """Keep a handle on the process: a kill can never hit another one that got the same pid later."""
        if member not in self._handles:
            with contextlib.suppress(OSError):
                self._handles[member] = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Send the launch command a signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def signal(self, member: str) -> bool:
        """SIGKILL to a member; False if it is gone."""
        with contextlib.suppress(ProcessLookupError, KeyError):
            signal.pidfd_send_signal(self._handles[member], signal.SIGKILL)
            return True
        return False
