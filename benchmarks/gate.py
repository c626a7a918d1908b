"""A gate between a benchmark's driver and the workers of two systems that take turns.

Both systems stay alive; workers wait at the gate until the driver lets all of one system run some steps.
So pairs of short segments alternate finely, and neither start-up nor a drift of the machine enters the ratio.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError

VARIABLE = "BENCH_GATE"


def peak_rss_bytes() -> int:
    """This process's peak resident memory (VmHWM), which unlike ru_maxrss does not carry over an exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError("/proc/self/status has no VmHWM line; memory can be measured on Linux only")


class Gate:
    """The worker's side: `wait` says that this worker is ready and blocks until it may run on."""

    def __init__(self, system: str, parameters: int, tokens_per_step: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[VARIABLE])
        self._file = self._socket.makefile("r")
        self._about = {
            "system": system,
            "pid": os.getpid(),
            "parameters": parameters,
            "tokens": tokens_per_step,
        }

    def wait(self, **more: Any) -> int:
        """The number of steps to run now; ends the process when the driver has had enough."""
        row = {**self._about, "rss_peak": peak_rss_bytes(), **more}
        self._socket.sendall((json.dumps(row) + "\n").encode())
        line = self._file.readline()
        if not line:
            os._exit(0)
        return int(line)


class Driver:
    """The driver's side: `admit` the workers of all systems, then `run` one system at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytes] = {}
        self._system_of: dict[socket.socket, str] = {}
        self.last: dict[socket.socket, dict[str, Any]] = {}
        self._ready: set[socket.socket] = set()

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                self._buffers[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj  # type: ignore[assignment]
            data = connection.recv(65536)
            if not data:
                raise BenchmarkError(f"a worker of {self._system_of.get(connection, '?')} left the gate")
            *lines, self._buffers[connection] = (self._buffers[connection] + data).split(b"\n")
            for line in lines:
                row = json.loads(line)
                self._system_of[connection] = row["system"]
                self.last[connection] = row
                self._ready.add(connection)

    def of(self, system: str) -> list[socket.socket]:
        """The connections of one system."""
        return [c for c, name in self._system_of.items() if name == system]

    def admit(self, expected: dict[str, int], timeout_s: float, check: Callable[[], None]) -> None:
        """Until every system has as many ready workers as expected; `check` may raise meanwhile."""
        deadline = time.monotonic() + timeout_s
        while any(len(self.of(name)) < count for name, count in expected.items()):
            if time.monotonic() > deadline:
                raise BenchmarkError(f"not all workers came to the gate in {timeout_s:.0f} s; expected {expected}")
            check()
            self._pump(0.2)

    def run(self, system: str, steps: int, timeout_s: float = 300.0) -> float:
        """Let one system run `steps` steps; the seconds until all its workers are back at the gate."""
        members = self.of(system)
        self._ready.difference_update(members)
        started = time.perf_counter()
        for connection in members:
            connection.sendall(f"{steps}\n".encode())
        while not self._ready.issuperset(members):
            if time.perf_counter() - started > timeout_s:
                raise BenchmarkError(f"{system} did not run {steps} steps in {timeout_s:.0f} s")
            self._pump(1.0)
        return time.perf_counter() - started

    def close(self) -> None:
        """Close all connections, which ends the workers, and remove the socket."""
        self._selector.close()
        for connection in (*self._buffers, self._server):
            connection.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
