"""One member of a group for test_tcp.py: RANK WORLD FOLDER COMMAND. Says how it went as one line of JSON.

cut:DELAY_S   rank 0 dies in the middle of large messages, so many seconds after it began; the others wait for them
open:FILES    with so many open files at most: connects, and says what it has open
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from elastic_harness.comm import tcp
from elastic_harness.errors import PeerFailed

ELEMENTS = 8_000_000


class Folder:
    """A rendezvous through files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, key: str, value: bytes) -> None:
        name = key.replace("/", "_")
        (self.path / f".{name}").write_bytes(value)
        os.rename(self.path / f".{name}", self.path / name)

    def get(self, key: str) -> bytes:
        while not (self.path / key.replace("/", "_")).exists():
            time.sleep(0.001)
        return (self.path / key.replace("/", "_")).read_bytes()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def build(rank: int, world: int, folder: Path) -> tcp.TcpTransport:
    return tcp.build(Folder(folder), rank, world, hostname="127.0.0.1", cancelled=lambda _: None)


def cut(rank: int, world: int, folder: Path, delay_s: float) -> dict[str, Any]:
    before = descriptors()
    group = build(rank, world, folder)
    if rank == 0:
        works = [group.send(torch.ones(ELEMENTS), peer, 5) for peer in range(1, world)]
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        group.wait(works, 60)
        signal.pause()
    work = group.receive(torch.empty(ELEMENTS), 0, 5)
    silent = group.receive(torch.empty(1), 3 - rank, 6)
    buffer = weakref.ref(work.tensor)
    abort = threading.Timer(1.0, group.abort)  # as the agent's announcement does
    abort.start()
    start = time.monotonic()
    error = ""
    try:
        group.wait((silent, work), 60)
    except PeerFailed as failure:
        error = str(failure)
    released_s = time.monotonic() - start
    abort.join()
    gc.disable()
    group.close()
    del group, work, silent
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return {
        "error": error,
        "released_s": released_s,
        "threads": threads,
        "descriptors": descriptors() - before,
        "buffer": buffer() is not None,
    }


def connect(rank: int, world: int, folder: Path, files: int) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    before = descriptors()
    group = build(rank, world, folder)
    one = [group.send(torch.ones(3), peer, 1) for peer in range(world) if peer != rank]
    group.wait([*one, *(group.receive(torch.empty(3), peer, 1) for peer in range(world) if peer != rank)], 20)
    return {"descriptors": descriptors() - before}


def main(rank: int, world: int, folder: Path, command: str) -> None:
    what, _, number = command.partition(":")
    told = cut(rank, world, folder, float(number)) if what == "cut" else connect(rank, world, folder, int(number))
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
