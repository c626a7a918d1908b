"""Connections between all members of one generation, and to nobody else.

Each member listens at its own port only as long as the members connect. Its address passes through the rendezvous
together with a random number that is new each time. A process that knows all these numbers is a member. Both ends of a
connection prove that before anything else is read from it. A stranger (a port scanner, a health check, a worker of an
earlier generation) is disconnected and takes nobody's place.

    the member of higher rank                    the member of lower rank
    connect ──► who I am, for whom, my proof ──► accept
            ◄── proof of the other member    ◄── or hang up
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastic_harness.comm.silence import Address, Connecting
from elastic_harness.errors import PeerFailed

if TYPE_CHECKING:
    from elastic_harness.comm.rendezvous import KeyValue

CONNECT_TIMEOUT_S = 25.0
AGAIN_S = 0.01
TICK_S = 0.002
STRANGERS_MAX = 64  # so many may wait to prove themselves; then the oldest is dropped, and a member connects again
NONCE_BYTES = 8  # of each member; a secret has those of two members at least
_BACKLOG = 4096
_MAGIC = 0x4C484D31
PROOF_BYTES = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"<II{PROOF_BYTES}s")  # magic, rank, proof


def connect(
    values: KeyValue, rank: int, world: int, *, hostname: str, cancelled: Callable[[float], None]
) -> tuple[dict[int, socket.socket], dict[int, Address]]:
    """Meet the other members. Return a connection to each of them, and the address where each of them listened.
    Collective; blocks until all are there. Raises what `cancelled` or the rendezvous raises when the generation has
    become void. Raises Unreachable if the network to some peers is cut, and PeerFailed with the ranks that did not
    connect in time or have gone."""
    with _listen(hostname) as listener:
        host, port = listener.getsockname()[:2]
        own = published(host, port, secrets.token_bytes(NONCE_BYTES))
        values.set(str(rank), own)
        told = [own if peer == rank else values.get(str(peer)) for peer in range(world)]
        places: list[Address] = [(there[0], there[1]) for there in map(json.loads, told)]
        addresses = {peer: place for peer, place in enumerate(places) if peer != rank}
        meeting = _Meeting(listener, rank, addresses, hashlib.sha256(b"\0".join(told)).digest())
        try:
            _meet(meeting, addresses, host, cancelled)
        except BaseException:
            meeting.close(everything=True)
            raise
        meeting.close()
    return meeting.connected, addresses


def published(host: str, port: int, nonce: bytes) -> bytes:
    """Return the bytes that a member publishes for the others."""
    return json.dumps([host, port, nonce.hex()]).encode()


def _meet(meeting: _Meeting, addresses: Mapping[int, Address], host: str, cancelled: Callable[[float], None]) -> None:
    """Connect until all members are connected."""

    def elsewhere() -> dict[int, Address]:
        """Return the peers on other hosts that are missing."""
        return {peer: address for peer, address in addresses.items() if peer in meeting.missing and address[0] != host}

    connecting = Connecting(elsewhere)
    give_up_at = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        while meeting.missing:
            cancelled(0.0)
            connecting.look()
            meeting.turn()
            if meeting.missing and time.monotonic() >= give_up_at:
                raise PeerFailed(f"no answer within {CONNECT_TIMEOUT_S:.0f} s", ranks=tuple(sorted(meeting.missing)))
    except ConnectionRefusedError as error:
        raise connecting.failed(PeerFailed(f"the transport could not be connected: {error}"), cancelled) from error
    finally:
        connecting.close()


def _listen(hostname: str) -> socket.socket:
    """Return a listening socket at a free port of this host."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = f"cannot listen at {hostname}: {error.strerror}; ELASTIC_HARNESS_HOST names this host's address"
        raise PeerFailed(reason) from error


class _Meeting:
    """Everything that is open while members connect. `connected`: by rank, the members that have proved themselves.
    `missing`: the others. Blocks no longer than it is told to."""

    def __init__(self, listener: socket.socket, rank: int, addresses: Mapping[int, Address], secret: bytes) -> None:
        self.connected: dict[int, socket.socket] = {}
        self.missing = set(addresses)
        self._listener, self._rank, self._addresses, self._secret = listener, rank, addresses, secret
        self._strangers: dict[socket.socket, bytes] = {}  # accepted, and what they have said so far
        self._calls: dict[socket.socket, tuple[int, bytes]] = {}  # whom, and what it has answered so far
        self._again: dict[int, float] = dict.fromkeys((peer for peer in addresses if peer < rank), 0.0)  # whom, when
        self._poll = selectors.DefaultSelector()
        self._poll.register(listener, selectors.EVENT_READ)

    def close(self, *, everything: bool = False) -> None:
        """Hang up on strangers. With `everything` hang up on members too, because the meeting failed."""
        self._poll.close()
        for sock in (*self._strangers, *self._calls, *(self.connected.values() if everything else ())):
            sock.close()

    def turn(self) -> None:
        """Do what can be done now, and wait TICK_S at most for it. Raises ConnectionRefusedError if a member has
        gone."""
        for peer in [peer for peer, at in self._again.items() if at <= time.monotonic()]:
            del self._again[peer]
            self._call(peer)
        for key, events in self._poll.select(TICK_S):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                self._accept()
            elif sock in self._strangers:
                self._hear_hello(sock)
            elif sock in self._calls and events & selectors.EVENT_WRITE:
                self._say_hello(sock, self._calls[sock][0])
            elif sock in self._calls:
                self._hear_answer(sock, *self._calls[sock])

    # ---- as the one of higher rank

    def _call(self, peer: int) -> None:
        try:
            sock = socket.socket(self._listener.family, socket.SOCK_STREAM)
        except OSError:  # no descriptors are left
            self._hang_up_on_the_oldest()
            self._again[peer] = time.monotonic() + AGAIN_S
            return
        sock.setblocking(False)
        self._calls[sock] = (peer, b"")
        self._poll.register(sock, selectors.EVENT_WRITE)
        self._check(sock, peer, sock.connect_ex(self._addresses[peer]))

    def _check(self, sock: socket.socket, peer: int, code: int) -> bool:
        """Return whether the call goes on, by the error code of connecting. If not, it is made again later."""
        if code == errno.ECONNREFUSED:
            host, port = self._addresses[peer]
            raise ConnectionRefusedError(f"rank {peer} is gone, nobody listens at {host}:{port}")
        if code in (0, errno.EINPROGRESS):
            return True
        self._hang_up(sock)
        self._again[peer] = time.monotonic() + AGAIN_S
        return False

    def _say_hello(self, sock: socket.socket, peer: int) -> None:
        if self._check(sock, peer, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            self._poll.modify(sock, selectors.EVENT_READ)
            with contextlib.suppress(OSError):  # it has hung up, which is seen when it is read from
                sock.send(_HELLO.pack(_MAGIC, self._rank, self._proof(self._rank, peer)))

    def _hear_answer(self, sock: socket.socket, peer: int, answer: bytes) -> None:
        """Read a peer's answer. A peer that hangs up has too many strangers, or is ending. In that case nobody listens
        there any more, and the next call is refused."""
        more = _receive(sock, PROOF_BYTES - len(answer))
        if more is None:
            return
        answer += more
        self._calls[sock] = peer, answer
        if not more:
            self._check(sock, peer, errno.ECONNRESET)
        elif len(answer) == PROOF_BYTES:
            if not hmac.compare_digest(answer, self._proof(peer, self._rank)):
                raise ConnectionRefusedError(f"rank {peer} is gone, somebody else listens in its place")
            self._admit(sock, peer)

    # ---- as the one of lower rank

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the caller has gone again
            return
        except OSError:  # no descriptors are left
            self._hang_up_on_the_oldest()
            return
        sock.setblocking(False)
        self._strangers[sock] = b""
        self._poll.register(sock, selectors.EVENT_READ)
        self._hear_hello(sock)
        if len(self._strangers) > STRANGERS_MAX:
            self._hang_up_on_the_oldest()

    def _hang_up_on_the_oldest(self) -> None:
        if self._strangers:
            self._hang_up(next(iter(self._strangers)))

    def _hear_hello(self, sock: socket.socket) -> None:
        """Read what a stranger says, and decide once it is a whole hello."""
        more = _receive(sock, _HELLO.size - len(self._strangers[sock]))
        if more is None:
            return
        said = self._strangers[sock] = self._strangers[sock] + more
        if more and len(said) < _HELLO.size:
            return
        peer = self._known(said)
        if peer is None:
            self._hang_up(sock)
            return
        with contextlib.suppress(OSError):  # the peer is gone already: the exchange will notice
            sock.send(self._proof(self._rank, peer))
        self._admit(sock, peer)

    def _known(self, said: bytes) -> int | None:
        """Return the missing member that says this; None if it is a stranger."""
        if len(said) < _HELLO.size:
            return None
        magic, peer, proof = _HELLO.unpack(said)
        if magic != _MAGIC or peer not in self.missing or peer <= self._rank:
            return None
        return peer if hmac.compare_digest(proof, self._proof(peer, self._rank)) else None

    # ---- as both

    def _proof(self, sender: int, receiver: int) -> bytes:
        return hmac.digest(self._secret, struct.pack("<II", sender, receiver), "sha256")

    def _admit(self, sock: socket.socket, peer: int) -> None:
        self._poll.unregister(sock)
        self._strangers.pop(sock, None)
        self._calls.pop(sock, None)
        self.missing.discard(peer)
        self.connected[peer] = sock

    def _hang_up(self, sock: socket.socket) -> None:
        self._poll.unregister(sock)
        self._strangers.pop(sock, None)
        self._calls.pop(sock, None)
        sock.close()


def _receive(sock: socket.socket, nbytes: int) -> bytes | None:
    """Return the bytes that have come, at most so many. Return None if nothing has come yet, no bytes if nothing ever
    will."""
    try:
        return sock.recv(nbytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
