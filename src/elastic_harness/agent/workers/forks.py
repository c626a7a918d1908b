"""The agent's side of the fork server: keeps it running, and a blank ready for the next worker.

If the server cannot be used, workers are started as new processes. Only the start of workers waits for the server, and
without it they would have to import the same modules themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, processes
from elastic_harness.agent.workers.process import Process
from elastic_harness.contract import wire
from elastic_harness.contract.forking import (
    BLANK,
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    BlankForked,
    BlankOrder,
    Fork,
    NotForked,
    Preload,
    Preloaded,
    UnsafeModule,
)
from elastic_harness.errors import InfrastructureError

BASE = ("torch", "torch._dynamo", "elastic_harness.train.run", "elastic_harness.gpt.trainer")
"""The modules that every worker imports, the second one with its first optimizer."""
IMPORTS = "imports.json"
READY_LIMIT_S = 60.0
FORK_LIMIT_S = 10.0
RESTARTS_MAX = 10
CALM_S = 600.0
REFUSED_S = 2.0
DESCRIPTORS_MAX = 16
Listen = Callable[[int, int, Callable[[int], None] | None], None]


class Blank:
    """A forked process that waits for its order. It is a child of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.process: Process | None = None
        self.forked_at = time.monotonic()
        self._decoder = wire.Decoder()

    def read(self) -> None:
        """Take what the blank says. Raises wire.Closed if it is gone."""
        try:
            data = self.connection.recv(4096)
            if not data:
                raise wire.Closed("it has ended")
            for message in map(wire.decode, self._decoder.feed(data)):
                self.process = Process(BLANK.unpack(message).pid)
        except BlockingIOError:
            return
        except (OSError, ValueError, AttributeError) as error:
            raise wire.Closed(str(error)) from error

    @property
    def ready(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def order(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        variables: Mapping[str, Sequence[int]],
        *,
        output: int,
        niceness: int,
    ) -> Process:
        """Make the blank a worker. variables: name → descriptors that the worker finds there. Raises OSError if it is
        gone."""
        assert self.process is not None
        descriptors, named = [output], dict[str, tuple[int, ...]]()
        for name, given in variables.items():
            named[name] = tuple(range(len(descriptors) - 1, len(descriptors) - 1 + len(given)))
            descriptors += given
        data = memoryview(wire.encode(BLANK.pack(BlankOrder(tuple(command), environment, named, niceness))))
        self.connection.settimeout(1.0)
        with self.connection:
            sent = socket.send_fds(self.connection, [data], descriptors)
            if sent < len(data):  # else nothing more is sent: the blank may have read everything and closed its end
                self.connection.sendall(data[sent:])
        return self.process

    def end(self) -> None:
        """End the blank, if it has not become a worker."""
        self.connection.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


class ForkServer:
    """The fork server and its blanks. `listen` is the event loop's, `tell` tells the user something. `changed` is
    called when a blank is ready, or when none is to be waited for any more."""

    def __init__(
        self, folder: Path, listen: Listen, tell: Callable[[str], None], changed: Callable[[], None] = lambda: None
    ) -> None:
        self._folder = folder
        self._listen = listen
        self._tell = tell
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._decoder = wire.Decoder()
        self._received: list[int] = []  # descriptors whose messages have not come yet
        self._blanks: list[Blank] = []
        self._asked = 0  # forks that were asked for and are not here yet
        self._wanted = 0
        self._files: tuple[tuple[str, int, int], ...] = ()
        self._ready = False
        self._refused_at: float | None = None  # when it could not fork, or what it forked died at once
        self._starts = 0  # since the last one that ran for a while
        self._started_at = 0.0
        self._asked_at = 0.0  # when it was last asked for something, or last did a part of that
        self._environment: dict[str, str] = {}
        known = _read(folder / IMPORTS)
        self._modules: list[str] = known.get("modules", [])
        self._unsafe: dict[str, str] = known.get("not_preloaded", {})
        self.learned = False  # what the workers of this launch import

    # ---- what the agent asks

    def start(self, environment: dict[str, str], wanted: int) -> None:
        """Start the process. It forks so many blanks when it has imported everything."""
        self._environment, self._wanted = environment, wanted
        self._launch()

    @property
    def preparing(self) -> bool:
        """Whether a blank is worth waiting for."""
        return self._process is not None and self._refused_at is None and not self.ready

    @property
    def ready(self) -> bool:
        """Whether there is a blank."""
        return any(blank.ready for blank in self._blanks)

    def keep(self, count: int) -> None:
        """Have so many blanks ready from now on."""
        self._wanted = count
        self._ask()

    def take(self) -> Blank | None:
        """Return a blank to make a worker of, or None. A blank that imported files that have changed since does not
        count."""
        if self._ready and self._stale():
            self._again()
            return None
        for blank in self._blanks:
            if blank.ready:
                self._forget(blank)
                self._ask()
                return blank
        return None

    def learn(self, modules: Sequence[str]) -> None:
        """Import what a worker has imported, so that later workers find it."""
        self.learned = True
        fresh = [name for name in modules if name not in self._modules and name not in BASE]
        if not fresh or self._control is None:
            return
        self._modules += fresh
        self._note()
        for blank in list(self._blanks):
            self._drop(blank)
        self._import()

    def tick(self) -> None:
        """Look after the server. Give it up if it is not ready in time. Let it try again if it could not fork. Replace
        it if it does not fork, or if its blanks do not say their pid."""
        now = time.monotonic()
        if self._refused_at is not None and now - self._refused_at > REFUSED_S:
            self._refused_at = None
            self._ask()
        for blank in [b for b in self._blanks if b.process is None and now - b.forked_at > FORK_LIMIT_S]:
            self._drop(blank)
            self._ask()
        waited_s = now - self._asked_at
        if self._process is not None and not self._ready and waited_s > READY_LIMIT_S:
            self._give_up(f"it is not ready after {READY_LIMIT_S:.0f} s")
        elif self._asked and waited_s > FORK_LIMIT_S:
            self._tell(f"the fork server has not forked for {FORK_LIMIT_S:.0f} s: another one takes its place")
            self._again()

    def close(self) -> None:
        """End the server and its blanks."""
        for blank in list(self._blanks):
            self._drop(blank)
        self._stop()

    @property
    def pids(self) -> set[int]:
        """The processes for which it is responsible."""
        blanks = {blank.process.pid for blank in self._blanks if blank.process is not None}
        return blanks if self._process is None else blanks | {self._process.pid}

    # ---- the process

    def _launch(self) -> None:
        self._starts += 1
        self._started_at = time.monotonic()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        parent = os.getpid()
        try:
            with (self._folder / "logs" / "fork-server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "elastic_harness.fork_server", "--control", str(theirs.fileno())],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    preexec_fn=lambda: processes.die_with_parent(parent, signal.SIGKILL),
                )
        except OSError as error:
            mine.close()
            self._give_up(error.strerror or str(error))
            return
        finally:
            theirs.close()
        mine.setblocking(False)
        self._control, self._decoder = mine, wire.Decoder()
        self._listen(mine.fileno(), selectors.EVENT_READ, lambda _: self._on_control())
        self._import()

    def _import(self) -> None:
        self._ready, self._asked_at = False, time.monotonic()
        self._send(Preload(tuple(name for name in (*BASE, *self._modules) if name not in self._unsafe)))

    def _again(self) -> None:
        """Start a fresh server in place of this one."""
        self.close()
        if time.monotonic() - self._started_at > CALM_S:
            self._starts = 0
        if self._starts > RESTARTS_MAX:
            self._give_up(f"it was started {self._starts} times")
        else:
            self._launch()

    def _give_up(self, why: str) -> None:
        self.close()
        self._tell(f"workers start without the fork server: {why}; see {self._folder / 'logs' / 'fork-server.log'}")
        self._changed()

    def _stop(self) -> None:
        if self._control is not None:
            self._listen(self._control.fileno(), 0, None)
            self._control.close()
            self._control = None
        for descriptor in self._received:
            os.close(descriptor)
        self._received.clear()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._ready, self._asked, self._refused_at = False, 0, None

    def _send(self, message: object) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                self._control.setblocking(True)
                self._control.sendall(wire.encode(TO_FORK_SERVER.pack(message)))
            self._control.setblocking(False)

    def _ask(self) -> None:
        missing = self._wanted - len(self._blanks) - self._asked
        if self._ready and missing > 0 and self._refused_at is None:
            self._asked, self._asked_at = self._asked + missing, time.monotonic()
            self._send(Fork(missing))

    # ---- what it says

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, DESCRIPTORS_MAX)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self._received += descriptors
        if not data:
            code = self._process.wait() if self._process is not None else None
            self._stop()
            self._tell(f"the fork server ended by itself (exit code {code})")
            self._again()
            return
        for message in map(wire.decode, self._decoder.feed(data)):
            match FROM_FORK_SERVER.unpack(message):
                case Preloaded(files):
                    self._ready, self._files = True, files
                    self._ask()
                case UnsafeModule(module, why):
                    self._leave_out(module, why)
                    self._note()
                    self._again()
                    return
                case NotForked(count, why):
                    self._asked -= count
                    self._refused_at = time.monotonic()
                    self._tell(f"the fork server cannot fork: {why}; it tries again in {REFUSED_S:.0f} s")
                    self._changed()
                case BlankForked():
                    self._asked, self._asked_at = self._asked - 1, time.monotonic()
                    connection = socket.socket(fileno=self._received.pop(0))
                    if self._ready:
                        self._on_blank(Blank(connection))
                    else:  # forked before it had imported what it has learned since: it ends with its connection
                        connection.close()

    def _leave_out(self, unsafe: str, why: str) -> None:
        """Import neither this module nor others of its package from now on. If that was not enough, import nothing that
        the workers have imported after it: each of those may bring it back, and to find out costs a server each."""
        package = unsafe.partition(".")[0]
        later = set(self._modules[self._modules.index(unsafe) :]) if unsafe in self._modules and self._unsafe else set()
        for name in (unsafe, *self._modules):
            if name not in self._unsafe and (name.partition(".")[0] == package or name in later):
                self._unsafe[name] = why
        more = f" and {len(later) - 1} modules that were imported after it" if len(later) > 1 else ""
        self._tell(f"the fork server leaves out {package}{more}: with {unsafe} {why}")

    def _on_blank(self, blank: Blank) -> None:
        blank.connection.setblocking(False)
        self._blanks.append(blank)
        self._listen(blank.connection.fileno(), selectors.EVENT_READ, lambda _: self._on_blank_said(blank))

    def _on_blank_said(self, blank: Blank) -> None:
        try:
            blank.read()
        except wire.Closed:
            self._drop(blank)
            if blank.process is None:  # it died before it told its pid, and so may the next ones
                self._refused_at = time.monotonic()
            self._ask()
        self._changed()

    def _forget(self, blank: Blank) -> None:
        self._blanks.remove(blank)
        self._listen(blank.connection.fileno(), 0, None)

    def _drop(self, blank: Blank) -> None:
        self._forget(blank)
        blank.end()

    def _stale(self) -> bool:
        """Return whether a file that the server has imported has changed since."""
        for path, at, size in self._files:
            try:
                status = os.stat(path)
            except OSError:
                return True
            if (status.st_mtime_ns, status.st_size) != (at, size):
                return True
        return False

    def _note(self) -> None:
        """Keep for the next launch what to import, and what to leave out."""
        content = json.dumps({"modules": self._modules, "not_preloaded": self._unsafe}, indent=1)
        with contextlib.suppress(InfrastructureError):  # the next launch learns it again
            durable_file.write(self._folder / IMPORTS, content.encode() + b"\n")


def uses_our_api(command: Sequence[str], mode: str | None) -> bool:
    """Return whether workers may be forked. They may if the command is a Python program, run by this interpreter, that
    calls `start`, as far as its text or an earlier launch tells."""
    if list(command[:1]) != [sys.executable] or len(command) < 2:
        return False
    if mode == "elastic" or tuple(command[1:3]) == ("-m", "elastic_harness.train"):
        return True
    with contextlib.suppress(OSError):
        return command[1] != "-m" and b"elastic_harness" in Path(command[1]).read_bytes()
    return False


def reap_orphans(known: Collection[int]) -> None:
    """Reap the processes that workers left behind, so that they do not stay as zombies. Children that are `known` are
    reaped elsewhere."""
    for pid in processes.children():
        if pid not in known and processes.stat(pid).state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _read(path: Path) -> dict[str, Any]:
    """Return what an earlier launch has noted; nothing if that cannot be read."""
    try:
        known = json.loads(path.read_text())
        modules, unsafe = known["modules"], known["not_preloaded"]
        if all(isinstance(name, str) for name in [*modules, *unsafe, *unsafe.values()]):
            return {"modules": list(modules), "not_preloaded": dict(unsafe)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}
