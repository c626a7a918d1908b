"""Members that connect while strangers do: everybody finds everybody, and nobody else is let in. Real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from elastic_harness.comm import mesh
from elastic_harness.comm.mesh import _HELLO, _MAGIC, PROOF_BYTES
from elastic_harness.comm.silence import Address
from elastic_harness.errors import GenerationChanged, PeerFailed

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")

HOST = "127.0.0.1"
Mesh = tuple[dict[int, socket.socket], dict[int, Address]]


class Values:
    """A rendezvous between threads; `publish` is called with each address before anybody else sees it."""

    def __init__(self, publish: Callable[[int, Address], None] = lambda rank, place: None) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._publish = publish

    def set(self, key: str, value: bytes) -> None:
        host, port = json.loads(value)[:2]
        self._publish(int(key), (host, port))
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 20)
            return self._values[key]


def start(values: Values, world: int, ranks: range | None = None) -> list[Future[Mesh]]:
    pool = ThreadPoolExecutor(world)
    try:
        return [
            pool.submit(mesh.connect, values, rank, world, hostname=HOST, cancelled=lambda _: None)
            for rank in (ranks or range(world))
        ]
    finally:
        pool.shutdown(wait=False)


def check_and_close(built: list[Mesh]) -> None:
    """Everybody has one connection to everybody, and each leads where it should; nobody listens any more."""
    for rank, (connected, addresses) in enumerate(built):
        assert sorted(connected) == sorted(addresses) == [peer for peer in range(len(built)) if peer != rank]
        for peer, sock in connected.items():
            sock.setblocking(True)
            sock.sendall(f"{rank} to {peer}".encode())
    for rank, (connected, _) in enumerate(built):
        for peer, sock in connected.items():
            assert sock.recv(100) == f"{peer} to {rank}".encode()
    for place in {place for _, addresses in built for place in addresses.values()}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, 5)
    for connected, _ in built:
        for sock in connected.values():
            sock.close()


@pytest.mark.parametrize("world", [2, 3, 8])
def test_everybody_is_connected_to_everybody_and_the_ports_are_closed(world: int) -> None:
    check_and_close([future.result(20) for future in start(Values(), world)])


GARBAGE = {
    "nothing": b"",
    "a scanner": b"GET / HTTP/1.0\r\n\r\n" * 10,
    "half a hello": _HELLO.pack(_MAGIC, 2, bytes(PROOF_BYTES))[:-1],
    "a rank without proof": _HELLO.pack(_MAGIC, 2, bytes(PROOF_BYTES)),
    "a rank that is nobody's": _HELLO.pack(_MAGIC, 1 << 31, bytes(PROOF_BYTES)),
    "the numbers 0 to 7": struct.pack("<8q", *range(8)),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("count", [1, 500])
def test_strangers_take_nobodys_place(said: bytes, count: int) -> None:
    """They come before any member can, more of them than may wait, and stay."""
    strangers: list[socket.socket] = []

    def visit(_: int, place: Address) -> None:
        for _ in range(count):
            strangers.append(socket.create_connection(place, 5))
            with contextlib.suppress(OSError):
                strangers[-1].sendall(said)

    began = time.monotonic()
    futures = start(Values(visit), 3)
    built = [future.result(20) for future in futures]
    assert time.monotonic() - began < 10
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):  # it was reset, with what it had said unread
            assert stranger.recv(100) == b"", "it was hung up on and told nothing"
        stranger.close()
    check_and_close(built)


def test_strangers_that_keep_coming_hold_nobody_up() -> None:
    ending, threads = threading.Event(), []

    def come(place: Address) -> None:
        while not ending.is_set():
            with contextlib.suppress(OSError), socket.create_connection(place, 5) as stranger:
                stranger.sendall(GARBAGE["a rank without proof"])

    def visit(_: int, place: Address) -> None:
        threads.append(threading.Thread(target=come, args=(place,)))
        threads[-1].start()

    try:
        check_and_close([future.result(20) for future in start(Values(visit), 3)])
    finally:
        ending.set()
        for thread in threads:
            thread.join()


def test_a_member_of_another_generation_is_a_stranger() -> None:
    """It comes with a proof that was good once: its own generation's, which the last one may have listened at the same
    port for."""
    proofs: list[bytes] = []
    proof_of = mesh._Meeting._proof

    def overheard(self: mesh._Meeting, sender: int, receiver: int) -> bytes:
        proofs.append(proof_of(self, sender, receiver))
        return proofs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh._Meeting, "_proof", overheard)
        check_and_close([future.result(20) for future in start(Values(), 2)])
    said = []

    def visit(rank: int, place: Address) -> None:
        if rank == 0:
            for proof in proofs:
                said.append(socket.create_connection(place, 5))
                said[-1].sendall(_HELLO.pack(_MAGIC, 1, proof))

    built = [future.result(20) for future in start(Values(visit), 2)]
    assert proofs and len(said) == len(proofs)
    for stranger in said:
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) == b""
        stranger.close()
    check_and_close(built)


def connect_to_made_up(place: Address) -> None:
    """Be rank 1, whose peer is said to listen there."""
    values = Values()
    values.set("0", mesh.published(*place, bytes(8)))
    mesh.connect(values, 1, 2, hostname=HOST, cancelled=lambda _: None)


def test_a_member_that_has_gone_is_noticed_at_once() -> None:
    with socket.create_server((HOST, 0)) as gone:
        place = gone.getsockname()
    with pytest.raises(PeerFailed, match=f"rank 0 is gone, nobody listens at {HOST}:{place[1]}"):
        connect_to_made_up(place)


def test_somebody_else_at_a_members_port_is_not_taken_for_it() -> None:
    with socket.create_server((HOST, 0)) as other, ThreadPoolExecutor(1) as pool:
        future = pool.submit(connect_to_made_up, other.getsockname())
        answering, _ = other.accept()
        with answering:
            answering.sendall(bytes(PROOF_BYTES))
            with pytest.raises(PeerFailed, match="somebody else listens in its place"):
                future.result(20)


def test_one_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server((HOST, 0)) as silent, pytest.raises(PeerFailed, match="no answer within") as caught:
        connect_to_made_up(silent.getsockname())
    assert caught.value.ranks == (0,)


def test_one_that_hangs_up_is_called_again() -> None:
    """It had too many strangers waiting."""
    with socket.create_server((HOST, 0)) as busy, ThreadPoolExecutor(1) as pool:
        future = pool.submit(connect_to_made_up, busy.getsockname())
        for _ in range(3):
            busy.accept()[0].close()
        last, _ = busy.accept()
        with last:
            last.sendall(bytes(PROOF_BYTES))
            with pytest.raises(PeerFailed):
                future.result(20)


def test_a_generation_that_is_void_is_given_up_at_once() -> None:
    void = threading.Event()

    def cancelled(_: float) -> None:
        if void.is_set():
            raise GenerationChanged("void")

    with socket.create_server((HOST, 0)) as silent, ThreadPoolExecutor(1) as pool:
        values = Values()
        values.set("0", mesh.published(*silent.getsockname(), bytes(8)))
        future = pool.submit(partial(mesh.connect, values, 1, 2, hostname=HOST, cancelled=cancelled))
        calling, _ = silent.accept()
        with calling:
            assert len(calling.recv(1000)) == _HELLO.size
            void.set()
            with pytest.raises(GenerationChanged):
                future.result(20)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_hosts_is_refused(host: str) -> None:
    with pytest.raises(PeerFailed, match=f"cannot listen at {host}: .*ELASTIC_HARNESS_HOST"):
        mesh.connect(Values(), 0, 2, hostname=host, cancelled=lambda _: None)


def test_ipv6() -> None:
    values = Values()
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(mesh.connect, values, rank, 2, hostname="::1", cancelled=lambda _: None) for rank in range(2)
        ]
        check_and_close([future.result(20) for future in futures])
