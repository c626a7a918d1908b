"""One member of a gloo group for test_gloo.py: RANK WORLD FOLDER. Rank 0 dies in the middle of large messages."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from elastic_harness.comm import gloo
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


def main(rank: int, world: int, folder: Path) -> None:
    group = gloo.build(Folder(folder), rank, world, hostname="127.0.0.1", cancelled=lambda _: None)
    if rank == 0:
        works = [group.send(torch.ones(ELEMENTS), peer, 5) for peer in range(1, world)]
        threading.Timer(float(folder.name), os.kill, (os.getpid(), signal.SIGKILL)).start()
        group.wait(works, 60)
        signal.pause()
    work = group.receive(torch.empty(ELEMENTS), 0, 5)
    silent = group.receive(torch.empty(1), 0, 6)
    threading.Timer(2.0, group.abort).start()  # as the agent's announcement does
    start = time.monotonic()
    try:
        group.wait((work, silent), 60)
    except PeerFailed:
        print(f"released after {time.monotonic() - start:.3f}", flush=True)
    group.close()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
