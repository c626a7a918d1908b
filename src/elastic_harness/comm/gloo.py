"""Point-to-point tensors between the members of one generation, over gloo: built in the background, abortable.

gloo has no way to cancel a pending receive from a peer that is alive but silent: `abort()` leaves it waiting for its
timeout. Shutting down the group's own TCP connections does it within a millisecond, on both sides. Only a message that
a peer's death cut in two is never given up, so the blocking wait happens in a thread that can be left behind.

This module is the only place that knows about it, and the one to look at when a new PyTorch changes something. The
connections are told from all other sockets of the process by gloo's own listening addresses, which pass through the
rendezvous; so is to whom each of them leads.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_harness.comm.group import Work, in_background
from elastic_harness.comm.reach import (
    LOOK_AFTER_S,
    LOOK_EVERY_S,
    Address,
    Connecting,
    Link,
    Silence,
    ask_again_and_again,
)
from elastic_harness.comm.rendezvous import KeyValue, RendezvousStore
from elastic_harness.errors import PeerFailed, Unreachable

CONNECT_TIMEOUT_S = 5.0  # gloo itself gives up after five times as long


class GlooGroup:
    """The transport of one generation. Local object; sends and receives are matched by (peer, tag). `addresses`: of the
    peers, by rank."""

    def __init__(self, group: Any, links: list[Link], addresses: Mapping[int, Address], rank: int, world: int) -> None:
        self._group = group
        self._links = links
        self._addresses = addresses
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
        """Block until all works are done; at most `timeout_s`, and not beyond `abort`. Raises Unreachable within three
        seconds of a cut, however long the others take.

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
            try:
                self._wait_until_over(job, timeout_s)
            except PeerFailed:
                waiter.jobs.put(None)  # it may stay where it is until its timeout; it holds nothing we use again
                raise
            if self._group is None:  # `close` has been here already and will not come again
                waiter.jobs.put(None)
            else:
                self._idle.append(waiter)
        if job.error:
            raise PeerFailed(job.error)

    def _wait_until_over(self, job: _Job, timeout_s: float) -> None:
        silence = Silence(self._links, self._addresses)
        give_up_at = time.monotonic() + timeout_s + 1.0
        look_in_s = LOOK_AFTER_S
        while not self._changed.wait_for(lambda: job.finished or self._aborted, look_in_s):
            silence.look()
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise PeerFailed(f"no answer within {timeout_s:.0f} s")
            look_in_s = min(LOOK_EVERY_S, left_s)
        if not job.finished:
            raise PeerFailed("the group was aborted")

    def abort(self) -> None:
        """Break every connection: all pending work of this group, here and at the peers, fails at once. Any thread
        may call it, any number of times."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the group; whatever is still pending is aborted."""
        self.abort()
        with self._changed:
            for link in self._links:
                link.connection.close()
            idle, self._links, self._idle = self._idle, [], []
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
    `cancelled` raises when the generation has become void, or Unreachable when the network to some of them is cut.
    `hostname`: the address peers reach this process at."""
    store = RendezvousStore(_WithoutPairs(values, world))

    def elsewhere() -> dict[int, Address] | None:
        """Where the peers on other hosts are, once all is known."""
        if len(store.received) < world:
            return None
        addresses = _addresses(store)
        return {peer: address for peer, address in addresses.items() if address[0] != addresses.get(rank, address)[0]}

    connecting = Connecting(elsewhere)

    def look(seconds: float) -> None:
        cancelled(seconds)
        connecting.look()

    try:
        return in_background(lambda: _connect(store, rank, world, hostname), look)
    except Unreachable:
        raise
    except PeerFailed as error:
        raise connecting.failed(error, cancelled) from error
    finally:
        connecting.close()


def _connect(store: RendezvousStore, rank: int, world: int, hostname: str) -> GlooGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
    group = dist.ProcessGroupGloo(store, rank, world, options)
    addresses = _addresses(store)
    own = addresses.pop(rank, None)
    links = _links(own, addresses)
    if len(links) < world - 1:
        for link in links:
            link.connection.close()
        raise RuntimeError(
            f"found {len(links)} of this group's {world - 1} connections: a peer has closed its own already. If every "
            f"attempt says so, this PyTorch ({torch.__version__}) lays out gloo's address differently: see comm/gloo.py"
        )
    return GlooGroup(group, links, addresses, rank, world)


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


def _addresses(store: RendezvousStore) -> dict[int, Address]:
    """Where the members listen, by rank: gloo's keys end in it."""
    blobs = {**store.published, **store.received}
    found = {key.rpartition("/")[2]: listening_address(blob) for key, blob in blobs.items()}
    return {int(rank): address for rank, address in found.items() if rank.isdecimal() and address is not None}


def listening_address(blob: bytes) -> Address | None:
    """What is in gloo's published address: host name (u64 length, bytes), then u64 length and a sockaddr."""
    try:
        (name_bytes,) = struct.unpack_from("<Q", blob, 0)
        (family,) = struct.unpack_from("<H", blob, 16 + name_bytes)
        (port,) = struct.unpack_from(">H", blob, 18 + name_bytes)
        if family == socket.AF_INET:
            return socket.inet_ntop(family, blob[20 + name_bytes : 24 + name_bytes]), port
        if family == socket.AF_INET6:
            return socket.inet_ntop(family, blob[24 + name_bytes : 40 + name_bytes]), port
    except (struct.error, OverflowError, ValueError):
        pass
    return None


def _links(own: Address | None, peers: Mapping[int, Address]) -> list[Link]:
    """This process's TCP connections to where a peer listens, or to where this process does. Of the latter only the
    host at the other end is known; between two hosts gloo connects in one direction. Duplicates of the descriptors."""
    found: dict[int, Link] = {}  # by descriptor
    at: dict[Address | str, tuple[int, ...]] = {}  # who listens at an address, and on a host
    for rank, address in peers.items():
        for place in (address, address[0]):
            at[place] = (*at.get(place, ()), rank)
    for name in os.listdir("/proc/self/fd"):
        if int(name) in found:
            continue
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        ranks = _leads_to(candidate, own, at)
        if ranks is None:
            candidate.close()
        else:
            ask_again_and_again(candidate)
            found[candidate.fileno()] = Link(candidate, ranks)
    return list(found.values())


def _leads_to(
    candidate: socket.socket, own: Address | None, at: Mapping[Address | str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Who may be at the other end of a connection of the group; None if it is none."""
    if candidate.family not in (socket.AF_INET, socket.AF_INET6) or candidate.type != socket.SOCK_STREAM:
        return None
    try:
        here, there = candidate.getsockname()[:2], candidate.getpeername()[:2]
    except OSError:
        return None
    exactly = at.get(there)
    if exactly or own is None or here[1] != own[1]:
        return exactly
    return at.get(there[0], ())
