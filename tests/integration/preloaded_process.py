"""A process that has imported torch and all of elastic_harness, and forks what tests start. Each child becomes what
`python …` would have made of it, as far as it and others can see.

    tests → here   {start: {command, environment, folder, session, namespace}} (with the descriptors of the input, the
                   output and the errors), {reap: pid}
    here → tests   {ready}, {pid}, {status}

Of a launch, two processes begin in the same way: the agent is a fork of the launcher, the fork server a fork of the
agent (`Forked`). So none of them has to import anything. Of torchrun, the workers are forks of its agent.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from elastic_harness import failpoints, fork_server
from elastic_harness.agent import elastic_run, plain_run
from elastic_harness.agent.control import commands
from elastic_harness.agent.workers import forks
from elastic_harness.agent.workers.process import Process
from elastic_harness.commands import launch
from elastic_harness.etcd import store

MESSAGE_MAX = 1 << 17
NET_NAMESPACE = 0x40000000  # CLONE_NEWNET
ALSO_USED = (commands, elastic_run, plain_run, store, run)  # by agents, torchrun's too
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    take_environment({name: value for name, value in os.environ.items() if name != "ROOM"})
    show(sys.orig_argv[:3], os.environ)
    sys.path.pop(0)
    gc.disable()
    unsafe = fork_server.preload(forks.BASE)
    assert unsafe is None, unsafe
    gc.freeze()
    begin_forking()
    line.send(json.dumps({"ready": True}).encode())
    serve(line)


def serve(line: socket.socket) -> NoReturn:
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, MESSAGE_MAX, 3)
        if not data:
            os._exit(0)
        match json.loads(data):
            case {"reap": pid}:
                _, status = os.waitpid(pid, 0)
                line.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            case {"start": order}:
                pid = fork(lambda order=order, files=descriptors: carry_out(order, files))
                for descriptor in descriptors:
                    os.close(descriptor)
                line.send(json.dumps({"pid": pid}).encode())


def carry_out(order: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    os.chdir(order["folder"])
    if order["session"]:
        os.setsid()
    if order["namespace"]:
        enter_network(order["namespace"])
    become(order["command"], order["environment"], streams)


def enter_network(name: str) -> None:
    with open(f"/run/netns/{name}") as namespace:
        if LIBC.setns(namespace.fileno(), NET_NAMESPACE):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


# ---- in place of subprocess.Popen


class Forked(Process):
    """A child that runs `python …`, with what the launcher and the agent need of `subprocess.Popen`."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: IO[bytes] | int | None,
        stderr: IO[bytes] | int | None,
        pass_fds: Collection[int] = (),
        start_new_session: bool,
        preexec_fn: Callable[[], None] = lambda: None,
    ) -> None:
        assert stdin in (None, subprocess.DEVNULL) and start_new_session and stderr in (stdout, subprocess.STDOUT)
        self.stdout: IO[bytes] | None = None
        if stdout is None:
            output, errors = os.dup(1), os.dup(2)
        elif stdout == subprocess.PIPE:
            mine, output = os.pipe()
            errors = os.dup(output)
            self.stdout = open(mine, "rb", buffering=0)
        else:
            assert not isinstance(stdout, int)
            output, errors = os.dup(stdout.fileno()), os.dup(stdout.fileno())

        def child() -> NoReturn:
            os.setsid()
            preexec_fn()
            become(args, env, (os.open(os.devnull, os.O_RDONLY), output, errors), pass_fds)

        super().__init__(fork(child))
        os.close(output)
        os.close(errors)

    @property
    def returncode(self) -> int | None:
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.poll() is None:
            with open(os.pidfd_open(self.pid)) as ended:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return super().wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin_forking() -> None:
    """Have these modules fork what they would start."""
    for module in (launch, forks):
        assert module.subprocess is subprocess
        module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    assert subprocess_handler.Popen is subprocess.Popen
    subprocess_handler.Popen = of_torchrun


def of_torchrun(args: Sequence[str], **given: Any) -> Forked:
    program, unbuffered, *rest = args
    assert unbuffered == "-u", "which PYTHONUNBUFFERED says too"
    return Forked([program, *rest], **given)


# ---- in place of exec


PATH = list(sys.path[1:])  # without the folder of this file


def fork(child: Callable[[], NoReturn]) -> int:
    """Fork. The child never returns to the frames that are on the stack now: they would clean up for the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        try:
            child()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(120)
    return pid


def become(
    command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int], kept: Collection[int] = ()
) -> NoReturn:
    """Become `python …` as exec would do it. Of the old program there remain imported modules, and objects that nobody
    can reach any more."""
    gc.freeze()  # nothing of the old program is closed later, under the number of a new descriptor
    forget_handlers()
    take_descriptors(streams, kept)
    sys.path[:] = PATH
    take_environment(environment)
    show(command, environment)
    sys.modules["numpy"].random.seed()
    failpoints.arm()
    gc.enable()
    if command[1] == "-m":
        sys.modules.pop(command[2], None)  # it is `__main__` now
    code: object = None
    try:
        fork_server.run_program(command)
    except SystemExit as error:
        code = error.code
    end(code)


def forget_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python sets them
        signal.signal(number, signal.SIG_IGN)


def take_descriptors(streams: Sequence[int], kept: Collection[int]) -> None:
    """Have the input, the output and the errors there, and nothing else open but what is kept."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    low = 3
    for descriptor in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(low, descriptor)
        low = descriptor + 1
    for descriptor in kept:
        os.set_inheritable(descriptor, True)


def take_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc tell the command line and the environment of this process as of one that was started so. They are
    written over those that it was started with, which nobody reads any more."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    places = list(map(int, fields[45:49]))
    texts = list(command), [f"{name}={value}" for name, value in environment.items()]
    for text, begin, end_ in zip(texts, places[::2], places[1::2], strict=True):
        data = b"".join(os.fsencode(part) + b"\0" for part in text)
        assert len(data) <= end_ - begin, "ROOM is too small"
        ctypes.memmove(begin, data.ljust(end_ - begin, b"\0"), end_ - begin)


def end(code: object) -> NoReturn:
    """End as Python does, but leave it to the kernel to clear away what was imported: to do it takes longer than most
    of these programs run."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
