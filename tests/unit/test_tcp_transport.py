"""The transport against a peer whose every byte the test decides. Real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from elastic_harness.comm.tcp import _FRAME, DATA, READY, TcpTransport, hash_of
from elastic_harness.errors import PeerFailed

PLACE = ("127.0.0.1", 1)


@pytest.fixture
def pair(no_descriptor_is_left: None) -> Iterator[tuple[TcpTransport, socket.socket]]:
    """A group of two, and the other end of its one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    theirs.settimeout(20)
    group = TcpTransport({1: ours}, {1: PLACE}, 0)
    yield group, theirs
    group.close()
    theirs.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "transport-tcp"]


def ready(tag: int, nbytes: int) -> bytes:
    return _FRAME.pack(READY, tag, nbytes, 0)


def data(tag: int, tensor: torch.Tensor) -> bytes:
    content = tensor.numpy().tobytes()
    return _FRAME.pack(DATA, tag, len(content), hash_of(memoryview(content), tag)) + content


def read(theirs: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        found += theirs.recv(nbytes - len(found))
    return found


def test_messages_are_matched_by_tag_and_come_in_any_pieces(pair: tuple[TcpTransport, socket.socket]) -> None:
    group, theirs = pair
    tensors = {tag: torch.zeros(size) for tag, size in ((7, 3), (8, 20_000), (9, 1), (10, 0))}
    works = [group.receive(tensor, 1, tag) for tag, tensor in tensors.items()]
    asked = [read(theirs, _FRAME.size) for _ in works]
    assert asked == [ready(tag, tensor.nbytes) for tag, tensor in tensors.items()]
    wanted = {tag: torch.randn(tensor.numel()) for tag, tensor in tensors.items()}
    told = b"".join(data(tag, tensor) for tag, tensor in reversed(wanted.items()))
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in range(60):
        theirs.sendall(told[byte : byte + 1])
    theirs.sendall(told[60:])
    group.wait(works, 20)
    assert all(torch.equal(tensors[tag], wanted[tag]) for tag in tensors)


def test_nothing_is_sent_before_its_receiver_is_ready(pair: tuple[TcpTransport, socket.socket]) -> None:
    group, theirs = pair
    first, second = torch.randn(5), torch.randn(7)
    works = [group.send(first, 1, 1), group.send(second, 1, 2)]
    with pytest.raises(PeerFailed, match="no answer from rank 1"):
        group.wait(works, 0.01)
    theirs.sendall(ready(2, second.nbytes))
    assert read(theirs, _FRAME.size + second.nbytes) == data(2, second)
    group.wait(works[1:], 20)
    assert not works[0].finished, "a wait that was given up has harmed nothing"
    theirs.sendall(ready(1, first.nbytes))
    group.wait(works, 20)


def test_what_a_peer_sent_before_it_died_counts(pair: tuple[TcpTransport, socket.socket]) -> None:
    """It leaves our bytes unread, so its end is a reset: nothing can be written any more, but all it sent be read."""
    group, theirs = pair
    big, small = torch.ones(50_000_000), torch.zeros(1000)
    sent, received = group.send(big, 1, 1), group.receive(small, 1, 2)
    read(theirs, _FRAME.size)
    with group._changed:  # so that all of it is there when the thread goes on
        theirs.sendall(ready(1, big.nbytes) + data(2, torch.ones(1000)))
    read(theirs, 1)
    theirs.close()
    group.wait([received], 20)
    assert torch.equal(small, torch.ones(1000))
    with pytest.raises(PeerFailed, match="the exchange with rank 1 broke"):
        group.wait([sent], 20)
    with pytest.raises(PeerFailed, match=r"could not receive from rank 1|the exchange with rank 1 broke"):
        group.wait([group.receive(small, 1, 3)], 20)  # the end may be noticed only now


def test_a_write_that_fails_does_not_keep_from_reading(pair: tuple[TcpTransport, socket.socket]) -> None:
    group, theirs = pair
    small = torch.zeros(1000)
    received = group.receive(small, 1, 2)
    read(theirs, _FRAME.size)
    sent = group.send(torch.ones(3), 1, 1)
    group._peers[1].sock.shutdown(socket.SHUT_WR)  # as after a reset: writing fails, reading does not yet
    theirs.sendall(ready(1, 12))
    with pytest.raises(PeerFailed):
        group.wait([sent], 20)
    theirs.sendall(data(2, torch.ones(1000)))
    group.wait([received], 20)
    assert torch.equal(small, torch.ones(1000))


def test_abort_ends_a_wait_from_another_thread_at_once(pair: tuple[TcpTransport, socket.socket]) -> None:
    group, theirs = pair
    work = group.receive(torch.zeros(1000), 1, 1)
    read(theirs, _FRAME.size)
    theirs.sendall(data(1, torch.ones(1000))[:100])  # cut in two
    timer = threading.Timer(0.05, group.abort)
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerFailed, match="aborted"):
        group.wait([work], 60)
    assert time.monotonic() - began < 5
    timer.join()
    for _ in range(2):  # any number of times, and whoever comes too late is told so
        group.close()
        for act in (group.send, group.receive):
            with pytest.raises(PeerFailed, match="aborted"):
                act(torch.zeros(1), 1, 2)
    assert theirs.recv(1) == b""


@pytest.mark.parametrize("frame", [_FRAME.pack(DATA, 5, 8, 0), _FRAME.pack(DATA, 6, 4, 0), _FRAME.pack(9, 5, 4, 0)])
def test_what_no_member_would_send_ends_the_transport(
    pair: tuple[TcpTransport, socket.socket], frame: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another length, a tag that nobody waits for, another kind."""
    group, theirs = pair
    work = group.receive(torch.zeros(1), 1, 5)
    read(theirs, _FRAME.size)
    theirs.sendall(frame + bytes(8))
    with pytest.raises(PeerFailed, match="aborted"):
        group.wait([work], 20)
    group.close()
    assert "Error" in capfd.readouterr().err


@pytest.mark.parametrize("at", [0, 4 * 20_000 - 1])
def test_a_bit_that_is_flipped_on_the_way_is_noticed(pair: tuple[TcpTransport, socket.socket], at: int) -> None:
    group, theirs = pair
    tensor = torch.zeros(20_000)
    work = group.receive(tensor, 1, 7)
    read(theirs, _FRAME.size)
    told = bytearray(data(7, torch.ones(20_000)))
    told[_FRAME.size + at] ^= 1
    theirs.sendall(told)
    with pytest.raises(PeerFailed, match="rank 1 broke: a message of 80000 bytes was damaged on its way"):
        group.wait([work], 20)


def test_a_message_under_the_tag_of_another_is_noticed(pair: tuple[TcpTransport, socket.socket]) -> None:
    group, theirs = pair
    work = group.receive(torch.zeros(3), 1, 7)
    group.receive(torch.zeros(3), 1, 8)
    read(theirs, 2 * _FRAME.size)
    told = bytearray(data(8, torch.ones(3)))
    told[4] = 7
    theirs.sendall(told)
    with pytest.raises(PeerFailed, match="damaged on its way"):
        group.wait([work], 20)
