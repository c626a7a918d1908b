"""What TCP knows of the links to the peers: whether a connection has gone silent, and whether a peer can be reached.

A cut network tells nobody, and a member that waits for a peer cannot know whether it is the peer's fault. The kernels
can. The peer's kernel acknowledges what arrives, whatever the process does, and even while the process is stopped. So a
connection is silent if nothing has come for a while although an answer is due, and this was so at two looks in a row.
This costs nothing while all goes well: only a member that has waited for long looks.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from elastic_harness.errors import PeerFailed, Unreachable

Address = tuple[str, int]

LOOK_AFTER_S, LOOK_EVERY_S = 1.0, 0.5  # of a wait; the two looks that a cut needs are done within three seconds of it
SILENT_S = 1.5  # more than one question of the kernel: it asks every second
PROBE_S = 1.5  # so long a peer may take to accept a connection
PROBE_EVERY_S = 4.0
_INFO = struct.Struct("=8B13I")  # the first fields of Linux' struct tcp_info
_ESTABLISHED = 1
_PROBES_MAX = 127


@dataclass(frozen=True)
class TcpLink:
    """A connection of the group, and the rank at its other end."""

    connection: socket.socket
    rank: int


def ask_again_and_again(connection: socket.socket) -> None:
    """Let the kernel ask the peer's kernel, every second in which nothing comes, whether it is still there. Otherwise a
    cut would not show on a connection over which this member only receives. The questions themselves end a connection
    only after two minutes without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES_MAX)


def silent_s(connection: socket.socket) -> float:
    """Return for how long nothing has come although an answer is due. Return 0 if all is well or the connection has
    ended."""
    try:
        info = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except (OSError, struct.error):
        return 0.0
    state, retransmits, probes, unacked = info[0], info[2], info[3], info[12]
    data_ms, acknowledgement_ms = info[19:21]  # since the last one came; data does not always count as acknowledgement
    answer_is_due = (unacked > 0 and retransmits > 0) or probes > 0
    return min(data_ms, acknowledgement_ms) / 1000 if state == _ESTABLISHED and answer_is_due else 0.0


@dataclass
class Silence:
    """Looks at links again and again. One look does not count: a question may have been sent a moment before it, after
    a long time in which there was none, although both peers are well."""

    links: Iterable[TcpLink]
    addresses: Mapping[int, Address]
    _before: frozenset[TcpLink] = frozenset()

    def look(self) -> None:
        """Look at all links. Raises Unreachable if some are silent and were so at the last look."""
        found = {link: s for link in self.links if (s := silent_s(link.connection)) >= SILENT_S}
        again = {link: s for link, s in found.items() if link in self._before}
        self._before = frozenset(found)
        ways = {
            link.rank: f"{_text(self.addresses[link.rank])} (nothing has come for {s:.1f} s)"
            for link, s in again.items()
        }
        if ways:
            raise Unreachable(ways)


class Probe:
    """Tries to connect to several addresses at once. Never blocks."""

    def __init__(self, addresses: Mapping[int, Address]) -> None:
        self.ways: dict[int, str] = {}  # to those who cannot be reached
        self.refused: list[int] = []  # their host can: the process has ended, or a firewall answers in its place
        self._addresses = addresses
        self._deadline = time.monotonic() + PROBE_S
        self._sockets: dict[int, socket.socket] = {}
        for rank, (host, _) in addresses.items():
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            self._sockets[rank] = sock
        self.over()

    def over(self) -> bool:
        """Return whether the outcome of all attempts is known."""
        late = time.monotonic() >= self._deadline
        for rank, sock in list(self._sockets.items()):
            address = self._addresses[rank]
            code = sock.connect_ex(address)  # the first time it begins to, then it tells how that went
            if code in (errno.EINPROGRESS, errno.EALREADY) and not late:
                continue
            self._sockets.pop(rank).close()
            if code == errno.ECONNREFUSED:
                self.refused.append(rank)
            elif code not in (0, errno.EISCONN):
                why = f"no answer within {PROBE_S:g} s" if late else os.strerror(code).lower()
                self.ways[rank] = f"{_text(address)} ({why})"
        return not self._sockets

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()


@dataclass
class Connecting:
    """Finds out which peers cannot be reached, when connecting takes long or has failed. `addresses`: of the peers on
    other hosts that are not connected yet."""

    addresses: Callable[[], Mapping[int, Address]]
    _probe: Probe | None = None
    _next_at: float = field(default_factory=lambda: time.monotonic() + LOOK_AFTER_S)

    def look(self) -> None:
        """Look at the links. Call this over and over while connecting. Never blocks; raises Unreachable."""
        now = time.monotonic()
        if self._probe is None and now >= self._next_at:
            self._probe = Probe(self.addresses())
        elif self._probe is not None and self._probe.over():
            ways = self._probe.ways
            self.close()
            self._next_at = now + PROBE_EVERY_S
            if ways:
                raise Unreachable(ways)

    def failed(self, error: PeerFailed, cancelled: Callable[[float], None]) -> PeerFailed:
        """Return the error for a connection that failed, with the peers that are the reason, as far as that can be
        found out. Blocks up to PROBE_S; raises what `cancelled` raises."""
        self.close()
        self._probe = Probe(self.addresses())
        while not self._probe.over():
            cancelled(0.02)
        if self._probe.ways:
            return Unreachable(self._probe.ways)
        return PeerFailed(str(error), ranks=tuple(sorted(self._probe.refused)))

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
