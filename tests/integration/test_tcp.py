"""The transport between real processes: a peer that dies in the middle of a message, and strangers at the door."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PEER = Path(__file__).with_name("tcp_peer.py")
WORLD = 3
pytestmark = pytest.mark.slow

Peer = subprocess.Popen[str]
Start = Callable[[str], list[Peer]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    peers: list[Peer] = []

    def begin(command: str) -> list[Peer]:
        for rank in range(WORLD):
            arguments = [sys.executable, str(PEER), str(rank), str(WORLD), str(tmp_path), command]
            peers.append(subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return peers

    yield begin
    for peer in peers:
        peer.kill()
        peer.communicate()


def said(peer: Peer) -> dict[str, Any]:
    assert peer.stdout is not None
    told: dict[str, Any] = json.loads(peer.stdout.readline())
    return told


@pytest.mark.parametrize("delay_s", ["0.001", "0.01", "0.2"])
def test_of_a_message_cut_in_two_nothing_is_left(start: Start, delay_s: str) -> None:
    """Who waits is released by `abort`, though it waits for another one; then no thread, descriptor or buffer is left,
    without a collection of garbage."""
    first, *others = start(f"cut:{delay_s}")
    for peer in others:
        told = said(peer)
        assert told["error"].endswith(("aborted", "closed by the peer")) and told["released_s"] < 5.0
        assert (told["threads"], told["descriptors"], told["buffer"]) == ([], 0, False)
    assert first.wait(20) == -9


def test_a_flood_of_strangers_does_not_use_up_descriptors(start: Start, tmp_path: Path) -> None:
    """More connections than a member may have files open, while it waits for the others and when it has them."""
    peers = start("open:40")
    with contextlib.ExitStack() as strangers:
        for rank in range(WORLD):
            while not (tmp_path / str(rank)).exists():
                assert peers[rank].poll() is None
                time.sleep(0.0005)
            host, port, _ = json.loads((tmp_path / str(rank)).read_text())
            try:
                for _ in range(200):
                    strangers.enter_context(socket.create_connection((host, port), 5))
            except ConnectionError:
                told = [(tmp_path / str(other)).exists() for other in range(WORLD)]
                assert all(told), "the ports are closed when all members are connected, and not before"
        for peer in peers:
            assert said(peer)["descriptors"] == WORLD - 1 + 2, "one for each peer, to wait with, to be woken by"
