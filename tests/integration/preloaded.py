"""A process that has imported torch and runs each script in a child, which finds what `python` would give it: importing
is what costs time. Its own end of the line is `Preloaded`, to be used by one thread.

    tests → here   {command, environment, folder} (with the descriptors of the output and of the errors)
    here → tests   {pid}, and {status} when it has ended
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_harness import fork_server
from elastic_harness.agent.workers.forks import BASE
from elastic_harness.contract.forking import BlankOrder

MESSAGE_MAX = 1 << 17
START_S = 120.0
READ_AT_THE_START = ("PYTHON", "OMP_", "MKL_", "TORCH_", "LD_")


class Preloaded:
    """The tests' side. It ends with `close`, or with the process that has it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._heard() == {"ready": True}

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """`python …` to its end, as `subprocess.run` does it, nothing at its input."""
        changed = dict(set(environment.items()) ^ set(self._environment.items()))
        late = [name for name in changed if name.startswith(READ_AT_THE_START)]
        assert not late, f"{late} would come too late: start it with python()"
        order = {"command": list(command), "environment": dict(environment), "folder": os.getcwd()}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            socket.send_fds(self._line, [json.dumps(order).encode()], [output.fileno(), errors.fileno()])
            pid = self._heard()["pid"]
            try:
                status = self._heard(timeout_s)["status"]
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._heard()
                raise subprocess.TimeoutExpired(list(command), timeout_s) from None
            said = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, errors)]
        return subprocess.CompletedProcess(list(command), status, *said)

    def close(self) -> None:
        self._line.close()
        self._process.wait()

    def _heard(self, timeout_s: float = START_S) -> dict[str, Any]:
        self._line.settimeout(timeout_s)
        data = self._line.recv(MESSAGE_MAX)
        assert data, f"the process that scripts are forked from ended with {self._process.wait()}"
        return json.loads(data)


# ---- the process


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)
    gc.disable()
    unsafe = fork_server.preload(BASE)
    assert unsafe is None, unsafe
    gc.freeze()
    line.send(json.dumps({"ready": True}).encode())
    fork_server.become(*serve(line))


def serve(line: socket.socket) -> tuple[BlankOrder, list[int]]:
    """Run one script after the other; returns in a child with what it is to become."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, MESSAGE_MAX, 2)
        if not data:
            os._exit(0)
        wanted = json.loads(data)
        output, errors = descriptors
        pid = os.fork()
        if not pid:
            line.close()
            os.chdir(wanted["folder"])
            keep_apart(errors)
            return BlankOrder(tuple(wanted["command"]), wanted["environment"], {}, niceness=0), [output]
        os.close(output)
        os.close(errors)
        line.send(json.dumps({"pid": pid}).encode())
        _, status = os.waitpid(pid, 0)
        line.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())


def keep_apart(errors: int) -> None:
    """Have the errors of what this process becomes go there; a worker's go where its output does."""
    run_program = fork_server.run_program

    def run(command: Sequence[str]) -> None:
        os.dup2(errors, 2)
        os.close(errors)
        run_program(command)

    fork_server.run_program = run


if __name__ == "__main__":
    main()
