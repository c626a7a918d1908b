"""One worker process as its agent sees it: spawned, watched, spoken to, reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from elastic_harness.agent.workers.forks import Blank
from elastic_harness.agent.workers.logs import WorkerLog
from elastic_harness.agent.workers.process import Process
from elastic_harness.contract import variables, wire
from elastic_harness.contract.board import BoardReader, Reading
from elastic_harness.contract.messages import TO_WORKER, LastStepDone, SlowWorker
from elastic_harness.incidents.code import Code
from elastic_harness.processes import Stat, die_with_parent

START_NICENESS = 5


class Why(Enum):
    """Why a worker is expected to leave."""

    LEFT_OUT = auto()  # it is not in the newest generation; the next one may want it again
    FINISHED = auto()  # the job is done, and it was a member
    STOPPED = auto()  # it was told to
    ROLLED_BACK = auto()  # the run goes on from an earlier step, and it is started again for that


@dataclass(frozen=True)
class Release:
    why: Why
    reason: str  # in words


@dataclass
class Worker:
    """Everything the agent knows of one member.

    `lost` is set once the membership was told that the worker is gone. `released` is set once the worker is expected to
    leave; its end after that is no failure. `exit_code` is set when the process was reaped, negative for a signal.
    """

    member: str
    index: int
    spare: bool
    process: subprocess.Popen[bytes] | Process
    pidfd: int
    board: BoardReader
    link: socket.socket
    log: WorkerLog
    started_at: float
    rank: int | None = None
    hello: bool = False
    niced: bool = False
    lost: bool = False
    released: Release | None = None
    ended_for: Code | None = None  # why the agent ended it or sent it away, or what it said of itself
    hang: str = ""
    diagnosis: tuple[str, ...] = ()  # what was found out before it was ended for a hang, in lines
    overdue: Reading | None = None  # the work that took too long, so that the worker was ended
    deadline_max_s: float = 0.0  # the longest that it may ever give itself for a piece of work
    out_of_memory: bool = False  # it says so itself
    oom_kills: int | None = None  # by how much the out-of-memory counter had risen when it was gone
    failure_reported: bool = False
    serves_from: int | None = None  # the run's farthest step when the worker began to take part, or to stand by
    finished: LastStepDone | None = None
    slow: SlowWorker | None = None  # what it has said of being slow, if it still is
    error: str = ""  # of its own code, or why it is refused
    detected_at: float = 0.0
    detected_by: str = ""
    exit_code: int | None = None
    last_reading: Reading | None = None
    beat_seen_at: float = 0.0
    compute_deadline_ms: int = 0
    decoder: wire.Decoder = field(default_factory=wire.Decoder)
    outbox: bytearray = field(default_factory=bytearray)
    link_open: bool = True
    garbled: str = ""
    _statm: int = -1
    _stat: int = -1

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def left_out(self) -> bool:
        """Whether the worker is expected to leave only because the newest generation is without it."""
        return self.released is not None and self.released.why == Why.LEFT_OUT

    def release(self, why: Why, reason: str) -> None:
        """Expect the worker to leave. The first reason counts."""
        self.released = self.released or Release(why, reason)

    def blame(self, code: Code) -> None:
        """Note why the worker ends, before its exit code says anything. The first reason counts."""
        self.ended_for = self.ended_for or code

    @property
    def alive(self) -> bool:
        """Whether the worker may still take part: it is neither dead nor asked to leave."""
        return self.running and not self.lost and not self.released

    def exiting(self) -> bool:
        """True from the moment the kernel begins to end the process.

        The kernel detaches the address space before it frees the memory, which takes about 80 ms per GiB. Only after
        that do waitpid and the end of the sockets follow. A detached address space shows as size 0 in `statm`. Reading
        that takes 2 to 5 µs, less than half of reading the PF_EXITING flag from `stat`, and it shows at the same
        moment.
        """
        if self._statm < 0:
            return False
        try:
            return os.pread(self._statm, 2, 0) in (b"0 ", b"")
        except OSError:
            return True

    def exit_code_early(self) -> int | None:
        """Return the exit code as the kernel shows it before the process can be reaped; None if the kernel does not
        tell."""
        status = self._stat_now().wait_status
        return os.waitstatus_to_exitcode(status) if status else None

    def stopped(self) -> bool:
        """True while the process is stopped by a job-control signal (not by a debugger)."""
        return self._stat_now().state == "T"

    def _stat_now(self) -> Stat:
        with contextlib.suppress(OSError):
            return Stat.parse(os.pread(self._stat, 4096, 0))
        return Stat()

    def send(self, message: object) -> bool:
        """Queue a message and send as much as the socket takes. Return True while something is left to send."""
        if not self.link_open:
            return False
        self.outbox += wire.encode(TO_WORKER.pack(message))
        return self.flush()

    def flush(self) -> bool:
        try:
            while self.outbox:
                del self.outbox[: self.link.send(self.outbox)]
        except BlockingIOError:
            return True
        except OSError:
            self.outbox.clear()
        return False

    def receive(self) -> tuple[list[bytes], bool]:
        """Return all messages that have arrived, not yet decoded, and whether there will be no more. That is so if the
        stream has ended, or if it is not a stream of messages (then `garbled` says why)."""
        messages: list[bytes] = []
        while self.link_open:
            try:
                data = self.link.recv(1 << 18)
                if not data:
                    return messages, True
                messages += self.decoder.feed(data)
            except BlockingIOError:
                return messages, False
            except OSError:
                return messages, True
            except wire.Malformed as error:
                self.garbled = str(error)
                return messages, True
        return messages, True

    def signal(self, number: int) -> None:
        """Send a signal to the worker and to everything it started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def restore_priority(self) -> None:
        """Undo the niceness it started with, where that is permitted."""
        if self.niced:
            self.niced = False
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self.pid, 0)

    def reap(self) -> int | None:
        """Return the exit code once the process has ended, else None. Processes that the worker leaves running are
        ended with it."""
        if self.exit_code is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.last_reading = self.board.read()
            self.exit_code = self.process.wait()
        return self.exit_code

    def close(self) -> None:
        self.link_open = False
        self.link.close()
        self.log.close()
        self.board.close()
        for descriptor in (self.pidfd, self._statm, self._stat):
            if descriptor >= 0:
                os.close(descriptor)
        self.pidfd = self._statm = self._stat = -1


def spawn(
    command: Sequence[str],
    environment: dict[str, str],
    *,
    member: str,
    index: int,
    spare: bool,
    log_path: Path,
    show: Callable[[str, bytes], None],
    nice: bool,
    snapshots: Sequence[int] = (),
    blank: Blank | None = None,
) -> Worker:
    """Start one worker in its own process group. It dies with the agent. `snapshots`: descriptors of the node's shared
    memory. `blank`: a forked process that is to become the worker, in place of a new one. Raises OSError if it cannot
    start."""
    board = BoardReader(member)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    log = WorkerLog(log_path, f"w{index}", show)
    agent_pid = os.getpid()

    def before_exec() -> None:
        os.setpgid(0, 0)
        die_with_parent(agent_pid, signal.SIGKILL)
        if nice:
            os.nice(START_NICENESS)

    environment = {
        **environment,
        variables.MEMBER: member,
    }
    descriptors = {
        variables.LINK: [theirs.fileno()],
        variables.BOARD: [board.descriptor],
        variables.SNAPSHOTS: list(snapshots),
    }
    process: subprocess.Popen[bytes] | Process
    try:
        if blank is not None:
            niceness = START_NICENESS if nice else 0
            process = blank.order(command, environment, descriptors, output=log.write_end, niceness=niceness)
        else:
            process = subprocess.Popen(
                command,
                env=environment | {name: ",".join(map(str, given)) for name, given in descriptors.items()},
                stdin=subprocess.DEVNULL,
                stdout=log.write_end,
                stderr=log.write_end,
                pass_fds=[descriptor for given in descriptors.values() for descriptor in given],
                preexec_fn=before_exec,
            )
    except BaseException:
        mine.close()
        log.close()
        board.close()
        raise
    finally:
        theirs.close()
        log.close_write_end()
    mine.setblocking(False)
    now = time.monotonic()
    worker = Worker(
        member, index, spare, process, os.pidfd_open(process.pid), board, mine, log, now, niced=nice, beat_seen_at=now
    )
    with contextlib.suppress(OSError):
        worker._statm = os.open(f"/proc/{process.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        worker._stat = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    return worker
