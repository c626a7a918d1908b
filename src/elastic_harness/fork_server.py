"""The fork server: a process that has imported torch, and all else that workers import. Workers that it forks start in
milliseconds.

The server runs no code of the user's. It has one thread, no connection but the one to its agent and no open device, and
it has drawn no random numbers. It forks *blanks*: children that wait for their orders. A child between server and blank
ends at once, so the blank becomes the agent's own child. The agent watches, reaps and ends it like any other. When its
order comes, a blank takes the environment, descriptors and command line of a worker, and becomes that worker.

`contract/forking.py` has the messages between agent, server and blanks.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import gc
import importlib
import importlib.machinery
import os
import random
import runpy
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from elastic_harness import failpoints, processes
from elastic_harness.contract import wire
from elastic_harness.contract.forking import (
    BLANK,
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    BlankForked,
    BlankOrder,
    BlankPid,
    Fork,
    NotForked,
    Preload,
    Preloaded,
    UnsafeModule,
)

PARENT_PATIENCE_S = 5.0  # a blank ends if it is not the agent's child after so long
DESCRIPTORS_MAX = 64  # in one message to a blank


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m elastic_harness.fork_server", description=__doc__)
    parser.add_argument("--control", type=int, required=True, help="the descriptor of the connection to the agent")
    given = parser.parse_args()
    sys.path.pop(0)  # the folder in which the server was started; a worker's command decides which folder belongs there
    gc.disable()  # while the server imports: that makes hardly any garbage
    become(*serve(socket.socket(fileno=given.control), os.getppid()))


# ---- the server


def serve(control: socket.socket, agent_pid: int) -> tuple[BlankOrder, list[int]]:
    """Import and fork as the agent says, until the agent closes the connection; then the process ends. The function
    returns only in a blank that got its order, with the order and its descriptors."""
    channel = wire.Channel(control)
    while True:
        try:
            message = TO_FORK_SERVER.unpack(channel.receive())
        except (wire.Closed, ValueError):
            os._exit(0)
        match message:
            case Preload(modules):
                unsafe = preload(modules)
                if unsafe is not None:
                    channel.send(FROM_FORK_SERVER.pack(unsafe))
                    os._exit(0)  # what the import has started cannot be undone
                gc.freeze()  # a collection in a child then does not touch the shared memory, which would copy it
                channel.send(FROM_FORK_SERVER.pack(Preloaded(loaded_files())))
            case Fork(count):
                for done in range(count):
                    try:
                        become_this = fork_blank(control, agent_pid)
                    except OSError as error:
                        channel.send(FROM_FORK_SERVER.pack(NotForked(count - done, str(error.strerror))))
                        break
                    if become_this is not None:
                        return become_this


def preload(modules: Iterable[str]) -> UnsafeModule | None:
    """Import these modules. A module that cannot be imported is left to the worker that needs it. Return the first
    module that leaves something behind which a forked process must not inherit, and what that is."""
    for name in modules:
        if name in sys.modules:
            continue
        before = _traces()
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
        left = _left_behind(before, _traces())
        if left:
            return UnsafeModule(name, left)
    return None


def fork_blank(control: socket.socket, agent_pid: int) -> tuple[BlankOrder, list[int]] | None:
    """Fork a blank that is the agent's child, and tell the agent. Return None in the server, and in the blank the
    result of `wait_for_order`. Raises OSError, in the server alone, if there is no room for another process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with mine, theirs:
        if not _fork_orphan():
            socket.send_fds(control, [wire.encode(FROM_FORK_SERVER.pack(BlankForked()))], [mine.fileno()])
            return None
        agent = theirs.dup()
    control.close()
    _become_child_of(agent_pid)
    return wait_for_order(agent)


def _fork_orphan() -> bool:
    """Fork a process whose parent ends at once. Return True in that process, False in the old one. Raises OSError, in
    the old process alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between:
        _, status = os.waitpid(between, 0)
        if status:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    return True


# ---- a blank


def _become_child_of(agent_pid: int) -> None:
    """Wait until the process in between is gone. From then on, die with the agent."""
    give_up_at = time.monotonic() + PARENT_PATIENCE_S
    while os.getppid() != agent_pid:
        if time.monotonic() > give_up_at:
            os._exit(1)
        time.sleep(0.0002)
    processes.die_with_parent(agent_pid, signal.SIGKILL)
    os.setpgid(0, 0)


def wait_for_order(agent: socket.socket) -> tuple[BlankOrder, list[int]]:
    """Tell the agent this process's id, and block until its order and the descriptors come. The process ends if the
    agent goes away instead."""
    try:
        wire.send(agent, BLANK.pack(BlankPid(os.getpid())))
        decoder = wire.Decoder()
        orders: list[BlankOrder] = []
        descriptors: list[int] = []
        while not orders:
            data, received, _, _ = socket.recv_fds(agent, 1 << 16, DESCRIPTORS_MAX)
            descriptors += received
            if not data:
                os._exit(0)
            orders = [BLANK.unpack(wire.decode(frame)) for frame in decoder.feed(data)]
    except (OSError, ValueError):
        os._exit(0)
    agent.close()
    return orders[0], descriptors


def become(order: BlankOrder, given: Sequence[int]) -> None:
    """Become the worker that was ordered: take its output, environment and priority, then run its program as `python`
    does."""
    output, *descriptors = given
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    if order.niceness:
        os.nice(order.niceness)
    os.environ.clear()
    os.environ.update(order.environment)
    for name, indexes in order.variables.items():
        os.environ[name] = ",".join(str(descriptors[index]) for index in indexes)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # from the system, as at its import; Python's own generator does so by itself
    failpoints.arm()
    gc.enable()
    run_program(order.command)


def run_program(command: Sequence[str]) -> None:
    """Run `python …` in this process. Show an error as Python does, without the frames of this module."""
    _, *arguments = command
    sys.orig_argv = list(command)
    safe = getattr(sys.flags, "safe_path", False)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            if not safe:
                sys.path.insert(0, os.getcwd())
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            sys.argv = arguments
            _run_script(arguments[0], safe)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run_script(path: str, safe: bool) -> None:
    if os.path.isdir(path):  # with a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 (this process is for that)


# ---- what an import leaves behind


def _traces() -> dict[str, Any]:
    """Return what a forked process would inherit besides memory."""
    return {
        "threads": set(os.listdir("/proc/self/task")),
        "descriptors": _descriptors(),
        "children": set(processes.children()),
        "random": _random_states(),
    }


def _left_behind(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return what an import has started, opened or drawn that must not be shared; "" if nothing."""
    threads = len(after["threads"] - before["threads"])
    if threads:
        return f"it starts {threads} thread{'s' * (threads > 1)}"
    opened = sorted({what for what in after["descriptors"] - before["descriptors"] if _must_not_be_shared(what)})
    if opened:
        return f"it opens {', '.join(opened)}"
    if after["children"] - before["children"]:
        return "it starts a process"
    drawn = sorted(name for name, state in before["random"].items() if after["random"].get(name) != state)
    return f"it draws from the random numbers of {' and '.join(drawn)}" if drawn else ""


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _must_not_be_shared(what: str) -> bool:
    return what.startswith(("socket:", "/dev/nvidia", "/dev/dri", "/dev/kfd", "anon_inode:"))


def _random_states() -> dict[str, Any]:
    """Return the states of the random generators that exist by now."""
    states: dict[str, Any] = {"random": hash(random.getstate())}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and hasattr(numpy, "random"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    if torch is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def loaded_files() -> tuple[tuple[str, int, int], ...]:
    """Return the files whose change makes this process stale: all that it has imported from outside of the standard
    library and of installed packages, and from each installed package the file with which its import begins."""
    paths = sysconfig.get_paths()
    standard, installed = (paths["stdlib"], paths["platstdlib"]), (paths["purelib"], paths["platlib"])
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not isinstance(path, str):
            continue
        if path.startswith(installed):
            if "." in name:
                continue
        elif path.startswith(standard):
            continue
        with contextlib.suppress(OSError):
            status = os.stat(path)
            found[path] = (path, status.st_mtime_ns, status.st_size)
    return tuple(found.values())


if __name__ == "__main__":
    main()
