"""Keeps the snapshots of a rank that has died, until the next job on its node no longer needs them. Without torch.

    python -m elastic_harness.checkpoint.memory.keeper --socket 5 --frames 6,7,8,9

The rank's writer listens on an abstract socket, whose name tells the job's folder and the node. When the rank has died
and everything is on disk, the writer hands the socket and the frames to this process and ends. The keeper gives the
frames' descriptors to every process of the same user that connects. It ends when one of them says so, or when for
`ALONE_S` no process has been connected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import xxhash

from elastic_harness.contract.shared_frames import from_text, to_text

ALONE_S = 900.0
WAIT_S = 60.0  # for a writer that is still writing to disk
_DESCRIPTORS_MAX = 250


def key_of(folder: Path, node: str) -> str:
    """Return the part of their names that the sockets of this user's jobs in a folder, on one node, have in common."""
    return xxhash.xxh3_128_hexdigest(f"{os.getuid()}\0{node}\0{folder}".encode())


def listen(key: str) -> socket.socket:
    """Return a socket at which the next job will find the kept memory."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0elastic-harness/{key}/{os.getpid()}")
    listening.listen(128)
    return listening


def start(listening: socket.socket, frames: Sequence[int]) -> None:
    """Hand socket and frames to a new process, which inherits no other descriptor and outlives this one."""
    descriptors = [listening.fileno(), *frames]
    command = [sys.executable, "-m", __name__, "--socket", str(descriptors[0]), "--frames", to_text(frames)]
    nowhere = subprocess.DEVNULL
    subprocess.Popen(
        command, stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=descriptors, start_new_session=True
    )


class Kept:
    """The memory that the keeper of one dead rank has given. `descriptors` of frames belong to this process."""

    def __init__(self, connection: socket.socket, descriptors: Sequence[int]) -> None:
        self._connection = connection
        self.descriptors = descriptors

    def close(self, *, needed: bool) -> None:
        """Let go of the memory. Unless it is still `needed`, the keeper ends."""
        with contextlib.suppress(OSError):
            if not needed:
                self._connection.send(b"end")
        self._connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def find(key: str) -> list[Kept]:
    """Return everything that is kept under a key. Wait for writers that are not done yet, for each at most `WAIT_S`."""
    with contextlib.suppress(OSError):
        names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
        return [kept for name in sorted(names) if name.startswith(f"@elastic-harness/{key}/") for kept in _ask(name)]
    return []


def _ask(name: str) -> list[Kept]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(WAIT_S)
    try:
        connection.connect(f"\0{name[1:]}")
        if _same_user(connection):
            _, descriptors, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS_MAX)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            if descriptors:
                return [Kept(connection, descriptors)]
    except OSError:  # the other process has ended, or is not done in time
        pass
    connection.close()
    return []


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def keep(listening: socket.socket, descriptors: Sequence[int], alone_s: float = ALONE_S) -> None:
    """Give the descriptors to every process that asks. End when one says that it is enough, or when none has been
    connected for `alone_s`."""
    connected: set[socket.socket] = set()
    try:
        while ready := select.select([listening, *connected], [], [], None if connected else alone_s)[0]:
            for one in ready:
                if one is listening:
                    connected.add(_welcome(one.accept()[0], descriptors))
                    continue
                said = b""
                with contextlib.suppress(OSError):
                    said = one.recv(16)
                if said:
                    return
                connected.remove(one)
                one.close()
    finally:
        for connection in connected:
            connection.close()


def _welcome(connection: socket.socket, descriptors: Sequence[int]) -> socket.socket:
    with contextlib.suppress(OSError):
        if _same_user(connection):
            socket.send_fds(connection, [b"k"], descriptors)
        else:
            connection.shutdown(socket.SHUT_RDWR)
    return connection


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=int, required=True, help="the listening socket")
    parser.add_argument("--frames", required=True, help="descriptors of the shared memory")
    arguments = parser.parse_args(argv)
    with socket.socket(fileno=arguments.socket) as listening:
        keep(listening, from_text(arguments.frames))
    return 0


if __name__ == "__main__":
    sys.exit(main())
