"""Asks Linux about processes, and ties processes to each other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import threading
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_LIBC = ctypes.CDLL(None)
_SCHEDSTAT = threading.local()
_THREADS_MAX = 64  # of a process, that are told of


class Stat(NamedTuple):
    """The fields of `/proc/PID/stat` that we use. All are empty if the process is gone."""

    state: str = ""  # one letter: T is stopped by a signal (not by a debugger), Z has ended and was not reaped
    started_at: str = ""  # in ticks of the kernel's clock: tells a process from a later one with the same id
    wait_status: int = 0  # set before the process can be reaped

    @staticmethod
    def parse(content: bytes) -> Stat:
        """Parse the file's content. A program's name stands in it too, and may hold blanks and parentheses."""
        fields = content.rpartition(b")")[2].decode().split()
        return Stat(fields[0], fields[19], int(fields[49])) if fields else Stat()


def stat(pid: int) -> Stat:
    """Return what the kernel tells of a process."""
    with contextlib.suppress(OSError):
        return Stat.parse(Path(f"/proc/{pid}/stat").read_bytes())
    return Stat()


def children() -> list[int]:
    """Return the direct children of this process's first thread."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def queued_s() -> float:
    """Return for how long the calling thread has been ready to run without a processor; 0 if the kernel does not tell.
    Takes about 1 µs."""
    try:
        if getattr(_SCHEDSTAT, "process", None) != os.getpid():  # a fork has the descriptor of its parent's thread
            _SCHEDSTAT.process = os.getpid()
            _SCHEDSTAT.descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(_SCHEDSTAT.descriptor, 64, 0).split()[1]) / 1e9
    except (OSError, IndexError, ValueError, AttributeError):
        return 0.0


def of_run(run_dir: Path) -> list[int]:
    """Return every process that belongs to a run and has not ended: by its environment, or the folder in its command
    line. This process is none."""
    found = []
    names = (f"ELASTIC_HARNESS_RUN_DIR={run_dir}", f"--run-dir\0{run_dir}", f"--folder\0{run_dir}/checkpoints")
    needles = [f"{name}\0".encode() for name in names]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid() or stat(int(entry.name)).state in ("Z", ""):
            continue
        with contextlib.suppress(OSError):
            content = (entry / "environ").read_bytes() + b"\0" + (entry / "cmdline").read_bytes()
            if any(needle in content for needle in needles):
                found.append(int(entry.name))
    return found


def die_with_parent(parent_pid: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent's thread ends. May be called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent has ended before the kernel was asked
        os._exit(128 + signal_number)


def let_trace(socket_descriptor: int) -> None:
    """Allow the process that made this socket pair, and those it starts, to read this one's memory, where Yama limits
    that to ancestors."""
    with socket.socket(fileno=os.dup(socket_descriptor)) as link:
        pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    _LIBC.prctl(_PR_SET_PTRACER, pid, 0, 0, 0)  # EINVAL where there is no Yama


def become_child_subreaper() -> None:
    """Have orphaned descendants become this process's children."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def caught_signals(pid: int) -> int:
    """Return the signals that a process has handlers for, as a mask: bit n - 1 is signal n."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(caught[1], 16) if caught else 0


def threads(pid: int) -> list[str]:
    """Return what the kernel tells of each thread of a process: its state, where in the kernel it waits, the system
    call with its arguments, and the kernel's stack. What this user may not read is left out."""
    try:
        numbers = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []
    return [line for number in numbers[:_THREADS_MAX] for line in _thread(f"/proc/{pid}/task/{number}", number)]


def _thread(folder: str, number: int) -> list[str]:
    name, waits_in, call = (_read(f"{folder}/{file}").strip() for file in ("comm", "wchan", "syscall"))
    state = re.search(r"^State:\s*(.*)$", _read(f"{folder}/status"), re.MULTILINE)
    told = [f"state {state[1]}" if state else "gone"]
    told += [f"waits in {waits_in}"] if waits_in not in ("", "0") else []
    told += [f"system call {call}"] if call else []
    frames = [f"  {line.rpartition(' ')[2]}" for line in _read(f"{folder}/stack").splitlines()]
    return [f"thread {number} ({name}): {', '.join(told)}", *frames]


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
