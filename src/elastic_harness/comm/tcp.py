"""Point-to-point tensors between the members of one generation, over our own TCP connections, which can be aborted at
once.

    the receiver  READY tag n ──►
                              ◄── DATA tag n hash, n bytes   the sender, once it has the tensor and knows of this

So bytes that arrive have a place to go to and are read straight into it. They are hashed where they are sent and where
they arrive, for TCP's own checksum has 16 bits and covers the wire alone. One thread moves all bytes of the transport.
Only this thread touches the connections, with one exception: any thread may shut them down. That ends all pending work
within a millisecond, here and at the peers, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import xxhash

from elastic_harness.comm import mesh
from elastic_harness.comm.rendezvous import KeyValue
from elastic_harness.comm.silence import LOOK_AFTER_S, LOOK_EVERY_S, Address, Silence, TcpLink, ask_again_and_again
from elastic_harness.comm.transport import Pending
from elastic_harness.errors import Inconsistent, PeerFailed
from elastic_harness.failpoints import failpoint

READY, DATA = 1, 2
_FRAME = struct.Struct("<IIQQ")  # kind, tag, bytes of the message, its hash
_STAGING_BYTES = 16 << 10
_PIECES_MAX = 16
_ABORTED = "the transport was aborted"

Item = TypeVar("Item")
Queues = dict[int, deque[Item]]


def build(
    values: KeyValue, rank: int, world: int, cancelled: Callable[[float], None], *, hostname: str
) -> TcpTransport:
    """Meet the other members and connect to each. Collective; blocks until all are there. Raises as `mesh.connect`."""
    connections, addresses = mesh.connect(values, rank, world, hostname=hostname, cancelled=cancelled)
    return TcpTransport(connections, addresses, rank)


class TcpTransport:
    """The transport of one generation. Local object. Sends and receives are matched by (peer, tag). `addresses`: of the
    peers, by rank."""

    def __init__(self, connections: Mapping[int, socket.socket], addresses: Mapping[int, Address], rank: int) -> None:
        self._addresses = addresses
        self._peers = {peer: _Peer(peer, sock) for peer, sock in connections.items()}
        self._links = [TcpLink(sock, peer) for peer, sock in connections.items()]
        self._changed = threading.Condition()  # guards all but the connections and what is being read
        self._fresh: set[_Peer] = set()  # peers with something to be sent that the thread does not know of
        self._aborted = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="transport-tcp", daemon=True)
        self.rank = rank
        self.world = len(connections) + 1
        self.device = torch.device("cpu")
        self.concurrent = True
        self._thread.start()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Pending:
        """Start sending a contiguous CPU tensor. It must not change until the work is done."""
        work = Pending(_content(tensor), tensor, rank)
        work.hash = hash_of(work.raw, tag)
        peer = self._peers[rank]
        with self._changed:
            self._check(peer, "send to")
            _put(peer.sends, tag, work)
            self._match(peer, tag)
        return work

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Pending:
        """Start receiving into a contiguous CPU tensor of exactly the sent size."""
        work = Pending(_content(tensor), tensor, rank)
        peer = self._peers[rank]
        with self._changed:
            self._check(peer, "receive from")
            _put(peer.receives, tag, work)
            self._push(peer, _FRAME.pack(READY, tag, len(work.raw), 0), None)
        return work

    def _check(self, peer: _Peer, what: str) -> None:
        if self._aborted or peer.broken:
            raise PeerFailed(f"could not {what} rank {peer.rank}: {_ABORTED if self._aborted else peer.broken}")

    def _match(self, peer: _Peer, tag: int) -> None:
        """Queue a message for sending if both sides are ready for it."""
        if not (tag in peer.sends and tag in peer.ready):
            return
        work, nbytes = _take(peer.sends, tag), _take(peer.ready, tag)
        if len(work.raw) != nbytes:
            raise ValueError(f"rank {peer.rank} waits for {nbytes} bytes and is sent {len(work.raw)} (tag {tag})")
        self._push(peer, _FRAME.pack(DATA, tag, nbytes, work.hash), work)

    def _push(self, peer: _Peer, frame: bytes, work: Pending | None) -> None:
        peer.out.append((memoryview(frame), None))
        if work is not None:
            peer.out.append((work.raw, work))
        self._fresh.add(peer)
        os.eventfd_write(self._bell, 1)

    def flush(self, below: int | None = None) -> None:
        """Do nothing, because everything starts at once."""

    def wait(self, works: Sequence[Pending], timeout_s: float) -> None:
        """Block until all works are done, at most `timeout_s`, and not beyond `abort`. Raises Unreachable within three
        seconds of a cut, however long the other works take."""
        silence = Silence(self._links, self._addresses)
        now = time.monotonic()
        give_up_at, look_at = now + timeout_s, now + LOOK_AFTER_S
        with self._changed:
            for work in works:
                while self._aborted or not work.finished:
                    if self._aborted:
                        raise PeerFailed(_ABORTED)
                    if work.error:
                        raise PeerFailed(f"the exchange with rank {work.rank} broke: {work.error}")
                    now = time.monotonic()
                    if now >= look_at:
                        silence.look()
                        look_at = now + LOOK_EVERY_S
                    if now >= give_up_at:
                        raise PeerFailed(f"no answer from rank {work.rank} within {timeout_s:.0f} s")
                    self._changed.wait(min(give_up_at, look_at) - now)

    def abort(self) -> None:
        """Break every connection. All pending work of this transport, here and at the peers, fails at once. Any thread
        may call it, any number of times."""
        with self._changed:
            if self._aborted:
                return
            self._aborted = True
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_RDWR)  # from here on nothing is read from any tensor
                peer.fail(_ABORTED)
            os.eventfd_write(self._bell, 1)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of the transport. Pending work is aborted. Nothing is written to any tensor afterwards."""
        self.abort()
        self._thread.join()
        with self._changed:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1
            for peer in self._peers.values():
                peer.sock.close()
                peer.arriving = peer.into = None

    # ---- the thread

    def _run(self) -> None:
        try:
            with select.epoll() as poll:
                poll.register(self._bell, select.EPOLLIN)
                by_descriptor = {peer.sock.fileno(): peer for peer in self._peers.values()}
                for descriptor in by_descriptor:
                    poll.register(descriptor, select.EPOLLIN)
                while not self._aborted:
                    self._turn(poll, by_descriptor)
        except BaseException:  # thread boundary: without this thread nothing would move
            traceback.print_exc()
            self.abort()

    def _turn(self, poll: select.epoll, by_descriptor: Mapping[int, _Peer]) -> None:
        """Wait until bytes can be moved, and move some of each peer."""
        for descriptor, events in poll.poll():
            peer = by_descriptor.get(descriptor)
            if peer is None:
                self._send_fresh(poll)
                continue
            try:
                if events & select.EPOLLOUT:
                    self._write(poll, peer)
                if events & ~select.EPOLLOUT:
                    self._read(peer)
            except OSError as error:
                poll.unregister(descriptor)
                with self._changed:
                    peer.fail(error.strerror or str(error))
                    self._changed.notify_all()

    def _send_fresh(self, poll: select.epoll) -> None:
        os.eventfd_read(self._bell)
        with self._changed:
            fresh, self._fresh = self._fresh, set()
        for peer in fresh:
            if not peer.writing and not peer.broken:
                peer.writing = True
                poll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
                self._write(poll, peer)

    def _write(self, poll: select.epoll, peer: _Peer) -> None:
        """Send as much as the connection takes now. If it takes nothing any more, the received bytes are still read to
        their end, because a peer that has died may have sent all that was wanted of it."""
        with self._changed:
            pieces = [peer.out[i][0] for i in range(min(len(peer.out), _PIECES_MAX))]
        sent, error = 0, ""
        try:
            sent = peer.sock.sendmsg(pieces)
        except BlockingIOError:
            return
        except OSError as failure:
            error = failure.strerror or str(failure)
        with self._changed:
            if error:
                peer.fail_sends(error)
                self._changed.notify_all()
            while peer.out and sent >= len(peer.out[0][0]):
                content, work = peer.out.popleft()
                sent -= len(content)
                if work is not None:
                    work.finished = True
                    self._changed.notify_all()
            if sent and peer.out:  # an abort may have emptied it meanwhile
                content, work = peer.out[0]
                peer.out[0] = content[sent:], work
            if not peer.out:
                peer.writing = False
                poll.modify(peer.sock.fileno(), select.EPOLLIN)

    def _read(self, peer: _Peer) -> None:
        """Receive the bytes that have come."""
        if peer.into is not None:
            got = peer.sock.recv_into(peer.into)
            if got == 0:
                raise ConnectionResetError("the connection was closed by the peer")
            self._arrived(peer, got)
            return
        got = peer.sock.recv_into(peer.staging[peer.staged :])
        if got == 0:
            raise ConnectionResetError("the connection was closed by the peer")
        self._take_frames(peer, peer.staged + got)

    def _take_frames(self, peer: _Peer, end: int) -> None:
        """Take apart the staged bytes, which were read from the peer."""
        at = 0
        while peer.into is None and end - at >= _FRAME.size:
            kind, tag, nbytes, told = _FRAME.unpack_from(peer.staging, at)
            at += _FRAME.size
            with self._changed:
                if peer.broken:  # the transport was aborted
                    return
                if kind == READY:
                    _put(peer.ready, tag, nbytes)
                    self._match(peer, tag)
                    continue
                work = _take(peer.receives, tag)
            if kind != DATA or len(work.raw) != nbytes:
                raise ValueError(f"rank {peer.rank} sends {nbytes} bytes for {len(work.raw)} (kind {kind}, tag {tag})")
            staged = min(end - at, nbytes)
            work.raw[:staged] = peer.staging[at : at + staged]
            at += staged
            peer.arriving, peer.into, peer.tag, work.hash = work, work.raw, tag, told
            self._arrived(peer, staged)
        peer.staged = end - at
        peer.staging[: peer.staged] = peer.staging[at:end]

    def _arrived(self, peer: _Peer, nbytes: int) -> None:
        """Note that so many more bytes of the message under way have come. Raises ConnectionError if they are not what
        was sent."""
        assert peer.into is not None and peer.arriving is not None
        peer.into = peer.into[nbytes:]
        if not peer.into:
            work = peer.arriving
            failpoint("transport.received", values=work.raw)
            if hash_of(work.raw, peer.tag) != work.hash:
                raise ConnectionError(f"a message of {len(work.raw)} bytes was damaged on its way")
            with self._changed:
                peer.arriving.finished = True
                peer.arriving = peer.into = None
                self._changed.notify_all()


class _Peer:
    """A connection, and what is under way on it. `broken`: why it can no longer be used."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ask_again_and_again(sock)
        self.rank, self.sock, self.broken = rank, sock, ""
        self.sends: Queues[Pending] = {}  # by tag; the peer is not ready for them yet
        self.receives: Queues[Pending] = {}
        self.ready: Queues[int] = {}  # by tag: the sizes of messages that the peer waits for and we do not have yet
        self.out: deque[tuple[memoryview, Pending | None]] = deque()
        self.writing = False  # the thread waits until more can be written
        self.staging = memoryview(bytearray(_STAGING_BYTES))
        self.staged = 0
        self.into: memoryview | None = None  # where the rest of the message under way goes
        self.arriving: Pending | None = None
        self.tag = 0  # of the message under way

    def fail(self, reason: str) -> None:
        """Give up all work that is under way."""
        self.broken = self.broken or reason
        self.fail_sends(reason)
        for work in (*(work for queue in self.receives.values() for work in queue), self.arriving):
            if work is not None:
                work.error = reason
        self.receives.clear()

    def fail_sends(self, reason: str) -> None:
        for work in (*(work for queue in self.sends.values() for work in queue), *(work for _, work in self.out)):
            if work is not None:
                work.error = reason
        for pending in (self.sends, self.ready, self.out):
            pending.clear()


def hash_of(content: memoryview, tag: int) -> int:
    """Return the 64-bit hash of a message."""
    return xxhash.xxh3_64_intdigest(content, tag)


def _put(queues: Queues[Item], tag: int, item: Item) -> None:
    queues.setdefault(tag, deque()).append(item)


def _take(queues: Queues[Item], tag: int) -> Item:
    queue = queues[tag]
    item = queue.popleft()
    if not queue:
        del queues[tag]
    return item


def _content(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, in place."""
    if not tensor.is_contiguous():
        raise Inconsistent(f"a tensor of shape {tuple(tensor.shape)} that is sent or received is not contiguous")
    flat = tensor.detach().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())  # type: ignore[arg-type]
