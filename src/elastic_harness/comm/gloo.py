"""Point-to-point tensors between the members of one generation, over gloo: built in the background, abortable.

gloo has no way to cancel a pending receive from a peer that is alive but silent: `abort()` leaves it waiting for its
timeout. Shutting down the group's own TCP connections does it within a millisecond, on both sides. Only a message that
a peer's death cut in two is never given up, so the blocking wait happens in a thread that can be left behind.

This module is the only place that knows about it, and the one to look at when a new PyTorch changes something. The
connections are told from all other sockets of the process by gloo's own listening ports, which pass through the
rendezvous.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_harness.comm.group import Work, in_background
from elastic_harness.comm.rendezvous import KeyValue, RendezvousStore
from elastic_harness.errors import PeerFailed

CONNECT_TIMEOUT_S = 5.0


class GlooGroup:
    """The transport of one generation. Local object; sends and receives are matched by (peer, tag)."""

    def __init__(self, group: Any, connections: list[socket.socket], rank: int, world: int) -> None:
        self._group = group
        self._connections = connections
        self._changed = threading.Condition()
        self._aborted = False
        self._idle: list[_Waiter] = []
        self.rank = rank
        self.world = world
        self.device = torch.device("cpu")
        self.concurrent = True

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Work:
        """Start sending a contiguous CPU tensor; it must not change until the work is done."""
        try:
            return Work(self._open().send([tensor], rank, tag), tensor, rank)
        except RuntimeError as error:
            raise PeerFailed(f"could not send to rank {rank}: {error}") from error

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Work:
        """Start receiving into a contiguous CPU tensor of exactly the sent size."""
        try:
            return Work(self._open().recv([tensor], rank, tag), tensor, rank)
        except RuntimeError as error:
            raise PeerFailed(f"could not receive from rank {rank}: {error}") from error

    def _open(self) -> Any:
        group = self._group
        if group is None:
            raise PeerFailed("the group is closed")
        return group

    def flush(self, below: int | None = None) -> None:
        """Nothing to do: gloo starts everything at once."""

    def wait(self, works: Sequence[Work], timeout_s: float) -> None:
        """Block until all works are done; at most `timeout_s`, and not beyond `abort`.

        The waiting itself is done by another thread: when a peer dies in the middle of a message, gloo closes the
        connection but never wakes the one who waits for that message, and nothing else can.
        """
        job = _Job(works, timeout_s)
        with self._changed:
            if self._aborted:
                raise PeerFailed("the group was aborted")
            waiter = self._idle.pop() if self._idle else _Waiter(self._changed)
        waiter.jobs.put(job)
        with self._changed:
            self._changed.wait_for(lambda: job.finished or self._aborted, timeout_s + 1.0)
            if not job.finished:
                waiter.jobs.put(None)  # it may stay where it is until its timeout; it holds nothing we use again
                raise PeerFailed("the group was aborted" if self._aborted else f"no answer within {timeout_s:.0f} s")
            if self._group is None:  # `close` has been here already and will not come again
                waiter.jobs.put(None)
            else:
                self._idle.append(waiter)
        if job.error:
            raise PeerFailed(job.error)

    def abort(self) -> None:
        """Break every connection: all pending work of this group, here and at the peers, fails at once. Any thread
        may call it, any number of times."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the group; whatever is still pending is aborted."""
        self.abort()
        with self._changed:
            for connection in self._connections:
                connection.close()
            idle, self._connections, self._idle = self._idle, [], []
            self._group = None
        for waiter in idle:
            waiter.end()


class _Job:
    """Some works to wait for, and how it went. The error is kept as text: an exception would hold the frames it came
    through, and they the group and its sockets."""

    def __init__(self, works: Sequence[Work], timeout_s: float) -> None:
        self.works = works
        self.deadline = time.monotonic() + timeout_s
        self.finished = False
        self.error = ""


class _Waiter:
    """A thread that blocks in gloo so that others need not."""

    def __init__(self, changed: threading.Condition) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = changed
        self._thread = threading.Thread(target=self._run, name="gloo-wait", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End an idle waiter: an interpreter that exits while a thread is inside gloo would abort."""
        self.jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._wait_for_next():
            pass

    def _wait_for_next(self) -> bool:
        """Serve one job; False at the end. A function of its own, so that an idle waiter holds nothing of the group."""
        job = self.jobs.get()
        if job is None:
            return False
        try:
            for work in job.works:
                work.wait_raw(max(0.001, job.deadline - time.monotonic()))
        except PeerFailed as error:
            job.error = str(error)
        with self._changed:
            job.finished = True
            self._changed.notify_all()
        return True


def build(values: KeyValue, rank: int, world: int, *, hostname: str, cancelled: Callable[[float], None]) -> GlooGroup:
    """Meet the other members and connect to each. Collective; blocks until all are there, and raises what
    `cancelled` raises when the generation has become void. `hostname`: the address peers reach this process at."""
    return in_background(lambda: _connect(values, rank, world, hostname), cancelled)


def _connect(values: KeyValue, rank: int, world: int, hostname: str) -> GlooGroup:
    store = RendezvousStore(_WithoutPairs(values, world))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
    group = dist.ProcessGroupGloo(store, rank, world, options)
    own_ports = {port for blob in store.published if (port := listening_port(blob))}
    peer_ports = {port for blob in store.received if (port := listening_port(blob))} - own_ports
    connections = _connections(own_ports, peer_ports)
    if len(connections) < world - 1:
        raise RuntimeError(
            f"found {len(connections)} of this group's {world - 1} connections; without them it could not be aborted. "
            f"This PyTorch ({torch.__version__}) lays out gloo's address differently: see comm/gloo.py"
        )
    return GlooGroup(group, connections, rank, world)


class _WithoutPairs:
    """Passes gloo's addresses on without the numbers of their pairs: 8 bytes for every member, in every member's
    address, which are the same in all of them, since each group has a device of its own."""

    def __init__(self, values: KeyValue, world: int) -> None:
        self._values = values
        self._pairs = struct.pack(f"<{world}q", *range(world))

    def set(self, key: str, value: bytes) -> None:
        known = value.endswith(self._pairs)
        self._values.set(key, b"\1" + value.removesuffix(self._pairs) if known else b"\0" + value)

    def get(self, key: str) -> bytes:
        value = self._values.get(key)
        return value[1:] + self._pairs if value[:1] == b"\1" else value[1:]


def listening_port(blob: bytes) -> int | None:
    """The TCP port in gloo's published address: host name (u64 length, bytes), then u64 length and a sockaddr."""
    try:
        (name_bytes,) = struct.unpack_from("<Q", blob, 0)
        family, port = struct.unpack_from("<H", blob, 16 + name_bytes)[0], 18 + name_bytes
        if family not in (socket.AF_INET, socket.AF_INET6):
            return None
        return int(struct.unpack_from(">H", blob, port)[0])
    except (struct.error, OverflowError):
        return None


def _connections(own_ports: set[int], peer_ports: set[int]) -> list[socket.socket]:
    """Duplicates of this process's TCP connections from one of `own_ports` or to one of `peer_ports`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        keep = False
        with contextlib.suppress(OSError):
            if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM:
                keep = candidate.getpeername()[1] in peer_ports or candidate.getsockname()[1] in own_ports
        found.append(candidate) if keep else candidate.close()
    return found
