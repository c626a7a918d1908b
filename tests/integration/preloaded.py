"""Starts programs as forks of a process that has imported torch: importing is what costs time. `preloaded()` is the one
of this test process.

    preloaded().run(["python", "script.py"], environment, timeout_s)     as `subprocess.run`
    preloaded().popen([…, "elastic_harness", "launch", …], env=…, …)     as `subprocess.Popen`

A launch that begins so forks its agent, and the agent forks its fork server (`preloaded_process.py`). All else is what
it is without: workers, writers and other commands are started by the agent as ever.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from integration.launch_tools import environment

PROCESS = Path(__file__).with_name("preloaded_process.py")
MESSAGE_MAX = 1 << 17
START_S = 120.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as workers have it: another one does not live on in a forked process
READ_AT_THE_START = ("PYTHON", "OMP_", "MKL_", "TORCH_", "LD_")
ROOM = "x" * (1 << 16)  # for what /proc shows of the forked processes: their command lines and environments


@functools.cache
def preloaded() -> Preloaded:
    process = Preloaded(environment())
    atexit.register(process.close)
    return process


Stream = IO[Any] | socket.socket | int  # a number: as of subprocess


class Preloaded:
    """The tests' side. It ends with `close`, or with the process that has it. To be used by one thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**environment, **ONE_THREAD}
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, PROCESS, str(theirs.fileno()), ROOM],
                env={**self._environment, "ROOM": ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._heard() == {"ready": True}

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """`python …` to its end, as `subprocess.run` does it, nothing at its input. `more`: as of `popen`."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self.popen(command, env=environment, stdout=output, stderr=errors, **more)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            said = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, errors)]
        assert process.returncode is not None
        return subprocess.CompletedProcess(list(command), process.returncode, *said)

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream,
        stderr: Stream = subprocess.STDOUT,
        start_new_session: bool = False,
        namespace: str = "",
        for_writers: Collection[str] = (),
    ) -> Started:
        """`python …`, as `subprocess.Popen` starts it; in a network namespace, if one is named. `for_writers`: names of
        variables that are meant for writers of checkpoints, which begin anew."""
        changed = dict(set({**ONE_THREAD, **env}.items()) ^ set(self._environment.items()))
        late = [name for name in changed if name.startswith(READ_AT_THE_START) and name not in for_writers]
        assert not late, f"{late} would come too late: start it as a new process"
        order = {
            "command": list(map(str, command)),
            "environment": dict(env),
            "folder": os.getcwd(),
            "session": start_new_session,
            "namespace": namespace,
        }
        errors = stdout if stderr == subprocess.STDOUT else stderr
        with open(os.devnull, "rb") as nothing:
            streams = [nothing if stream == subprocess.DEVNULL else stream for stream in (stdin, stdout, errors)]
            socket.send_fds(self._line, [json.dumps({"start": order}).encode()], [s.fileno() for s in streams])
        return Started(self, order["command"], self._heard()["pid"])

    def reap(self, pid: int) -> int:
        """The exit code of a process that has ended."""
        self._line.send(json.dumps({"reap": pid}).encode())
        return self._heard()["status"]

    def close(self) -> None:
        self._line.close()
        self._process.wait()

    def _heard(self) -> dict[str, Any]:
        self._line.settimeout(START_S)
        data = self._line.recv(MESSAGE_MAX)
        assert data, f"the process that programs are forked from ended with {self._process.wait()}"
        return json.loads(data)


class Started:
    """A process that was forked for the tests, with what they need of `subprocess.Popen`. As a child of this process it
    would, it stays a zombie until it is asked about."""

    def __init__(self, parent: Preloaded, command: list[str], pid: int) -> None:
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            if end.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = self._parent.reap(self.pid)
                os.close(self._pidfd)
        return self.returncode
