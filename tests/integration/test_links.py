"""TCP between hosts whose network is cut: who is named, how soon, and that nobody innocent is."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.hosts import Host, Network

from elastic_harness.comm.silence import Probe
from integration.launch_tools import environment
from integration.preloaded import preloaded

PEER = Path(__file__).with_name("link_peer.py")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]


class Peer:
    """A member's process, and the two ends of the line to it."""

    def __init__(self, arguments: list[object], host: Host, errors: Path) -> None:
        self._line, theirs = socket.socketpair()
        with theirs, errors.open("ab") as file:
            command = [sys.executable, *map(str, arguments)]
            options = {"stdin": theirs, "stdout": theirs, "stderr": file, "namespace": host.name}
            self.process = preloaded().popen(command, env=environment(), **options)
        self.stdin, self.stdout = self._line.makefile("w"), self._line.makefile("r")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.stdin, self.stdout, self._line):
            end.close()


Start = Callable[..., list[Peer]]


@pytest.fixture
def start(network: Network, tmp_path: Path) -> Iterator[Start]:
    """Starts a member on each host, which does what its command says."""
    peers: list[Peer] = []

    def begin(*commands: str) -> list[Peer]:
        for rank, (host, command) in enumerate(zip(network.hosts, commands, strict=False)):
            arguments = [PEER, rank, len(commands), tmp_path, host.address, command]
            peers.append(Peer(arguments, host, tmp_path / "errors"))
        return peers

    yield begin
    for peer in peers:
        peer.end()


def ready(*peers: Peer) -> None:
    for peer in peers:
        assert peer.stdout.readline() == "ready\n"


def go_on(*peers: Peer) -> None:
    for peer in peers:
        peer.stdin.write("go on\n")
        peer.stdin.flush()


def said(peer: Peer) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(peer.stdout.readline())
    return told


@pytest.mark.parametrize("command", ["receive", "exchange"])
def test_a_cut_link_is_named_by_both_ends_and_by_nobody_else(network: Network, start: Start, command: str) -> None:
    a, b, _ = network.hosts
    first, second, third = start(f"{command}:1", f"{command}:0", "receive:0")
    ready(first, second, third)
    a.cut(to=b)
    b.cut(to=a)
    go_on(first, second, third)
    for peer, accused, host in ((first, "1", b), (second, "0", a)):
        told = said(peer)
        assert list(told["ways"]) == [accused] and told["ways"][accused].startswith(f"{host.address}:")
        assert told["took_s"] < 4.0
        assert told["probes"] == [], "when all was well nobody probed"
    go_on(first)  # which ends, and so the third one's wait
    assert not said(third)["ways"]


@pytest.mark.parametrize(("command", "deaf"), [("receive", 0), ("exchange", 1)])
def test_a_link_cut_one_way_is_named_by_the_deaf_end(network: Network, start: Start, command: str, deaf: int) -> None:
    peers = start(f"{command}:1", f"{command}:0")
    ready(*peers)
    network.hosts[1 - deaf].cut(to=network.hosts[deaf])
    go_on(*peers)
    told = said(peers[deaf])
    assert list(told["ways"]) == [str(1 - deaf)] and told["took_s"] < 4.0


def test_a_host_that_vanishes_is_named_by_all(network: Network, start: Start) -> None:
    gone = network.hosts[1]
    peers = start("exchange:1", "receive:0", "receive:1")
    ready(*peers)
    gone.kill_all()
    go_on(peers[0], peers[2])
    for peer in (peers[0], peers[2]):
        told = said(peer)
        assert list(told["ways"]) == ["1"] and told["took_s"] < 4.0


def test_a_paused_peer_is_not_accused(network: Network, start: Start) -> None:
    first, second = start("exchange:1", "send")
    ready(first, second)
    second.process.send_signal(signal.SIGSTOP)
    go_on(first)
    time.sleep(6.0)  # nothing can be waited for: nothing is to happen
    second.process.send_signal(signal.SIGCONT)
    go_on(second)
    told = said(first)
    assert not told["error"] and told["took_s"] > 5.0


@pytest.mark.parametrize("way", ["both ways", "one way", "the other way"])
def test_who_cannot_be_reached_is_known_while_building(network: Network, start: Start, way: str) -> None:
    a, b, _ = network.hosts
    if way != "the other way":
        a.cut(to=b)
    if way != "one way":
        b.cut(to=a)
    first, second, third = start("build", "build", "build")
    for peer, accused, host in ((first, "1", b), (second, "0", a)):
        told = said(peer)
        assert list(told["ways"]) == [accused], told
        address, _, port = told["ways"][accused].split()[0].rpartition(":")
        assert address == host.address and int(port) > 0
        assert told["took_s"] < 4.5, "an interpreter that starts later waits for less"
    told = said(third)
    assert not told["error"] and not told["probes"]


def test_a_probe_does_not_disturb_who_is_probed(start: Start, tmp_path: Path) -> None:
    """A member that is stopped before it has connected is probed, which its kernel answers, and then connected to."""
    first, second = start("build", "build")
    while not (tmp_path / "1").exists():
        time.sleep(0.0005)
    second.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # long enough for a probe
    second.process.send_signal(signal.SIGCONT)
    for peer in (first, second):
        assert not said(peer)["error"]


def test_a_probe_tells_refused_from_unreachable(network: Network) -> None:
    a, b, _ = network.hosts
    b.cut()
    probe = Probe({1: (a.address, 9), 2: (b.address, 9), 3: ("127.0.0.1", 9)})
    began = time.monotonic()
    while not probe.over():
        time.sleep(0.01)
    assert sorted(probe.refused) == [1, 3]
    assert probe.ways == {2: f"{b.address}:9 (no answer within 1.5 s)"}
    assert time.monotonic() - began < 2.0
