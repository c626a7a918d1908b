"""Hosts made of network namespaces: what the benchmarks say of cut networks rests on them."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks import hosts
from benchmarks.hosts import Host, Network

pytestmark = pytest.mark.usefixtures("namespaces")
ROOT = Path(__file__).resolve().parents[2]
PORT = 7000
PATIENCE_S = 20.0
SILENCE_S = 0.3
ECHO = f"""
import socket, threading
def serve(link):
    while data := link.recv(4096):
        link.sendall(data)
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""
ASK = f"""
import socket, sys
link = socket.create_connection((sys.argv[1], {PORT}), timeout={PATIENCE_S})
link.sendall(b"asked")
print(link.recv(4096).decode(), link.getpeername()[0])
"""
HEAR = f"""
import socket
link = socket.socket(type=socket.SOCK_DGRAM)
link.bind(("", {PORT}))
print("ready", flush=True)
while True:
    print(link.recv(4096).decode(), flush=True)
"""
TELL = f"""
import contextlib, socket, sys
with contextlib.suppress(PermissionError):
    socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], {PORT}))
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
first = os.getpid()
os.fork() or os.setsid()
os.fork()
if os.getpid() == first:
    print("ready", flush=True)
time.sleep(1000)
"""
OWNER = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from benchmarks.hosts import Network
signal.signal(signal.SIGINT, signal.default_int_handler)
with Network(2) as network:
    network.hosts[0].popen(["sleep", "1000"])
    print(network.bridge, flush=True)
    time.sleep(1000)
"""


def start(host: Host, program: str) -> subprocess.Popen[str]:
    """A process that has said that it is ready."""
    process = host.popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def running(host: Host, program: str) -> Iterator[subprocess.Popen[str]]:
    with start(host, program) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str], last: str) -> list[str]:
    """What HEAR has heard before `last`."""
    assert process.stdout is not None
    texts = []
    while (text := process.stdout.readline().strip()) != last:
        assert text, f"ended before it heard {last!r}"
        texts.append(text)
    return texts


def ask(host: Host, other: Host) -> str:
    return host.run([sys.executable, "-c", ASK, other.address]).stdout.strip()


def tell(host: Host, other: Host, text: str) -> None:
    host.run([sys.executable, "-c", TELL, other.address, text])


def tell_from_here(host: Host, text: str) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as link:
        link.sendto(text.encode(), (host.address, PORT))


def left_of(network: Network) -> list[str]:
    """Its interfaces, namespaces and processes."""
    names = [p.name for place in ("/sys/class/net", "/var/run/netns") for p in Path(place).glob(f"{network.bridge}*")]
    for host in network.hosts:
        names += [str(p.pid) for p in host._processes if p.returncode is None]
    return names


def test_hosts_reach_each_other_and_this_machine(network: Network) -> None:
    a, b, c = network.hosts
    with running(a, ECHO) as server:
        assert ask(b, a) == f"asked {a.address}"
        assert ask(a, a) == f"asked {a.address}"
        with socket.create_connection((a.address, PORT), timeout=PATIENCE_S) as link:
            link.sendall(b"here")
            assert link.recv(9) == b"here"
        assert a.pids() == [server.pid]
        with pytest.raises(hosts.CommandFailed, match="Connection refused"):
            ask(a, c)


def test_a_cut_is_silent_and_heals(network: Network) -> None:
    a, b, _ = network.hosts
    with running(a, ECHO), socket.create_connection((a.address, PORT), timeout=SILENCE_S) as link:
        a.cut()
        link.sendall(b"late")
        with pytest.raises(TimeoutError):
            link.recv(9)
        with pytest.raises(TimeoutError):
            socket.create_connection((a.address, PORT), timeout=SILENCE_S)
        a.heal()
        link.settimeout(PATIENCE_S)
        assert link.recv(9) == b"late"
        assert ask(b, a) == f"asked {a.address}"
        a.heal()


def test_a_cut_host_keeps_its_loopback(network: Network) -> None:
    a = network.hosts[0]
    a.cut()
    with running(a, ECHO):
        assert ask(a, a) == f"asked {a.address}"


def test_a_cut_may_be_one_way(network: Network) -> None:
    a, b, c = network.hosts
    with running(a, HEAR) as at_a, running(b, HEAR) as at_b:
        a.cut(to=b)
        tell(a, b, "lost")
        tell(c, b, "end")
        assert heard(at_b, "end") == []
        tell(b, a, "the other way")
        tell(c, a, "end")
        assert heard(at_a, "end") == ["the other way"]
        a.heal()
        tell(a, b, "healed")
        tell(c, b, "end")
        assert heard(at_b, "end") == ["healed"]


def test_a_share_of_packets_is_lost(network: Network) -> None:
    a = network.hosts[0]
    with running(a, HEAR) as at_a:
        a.lose(0.5)
        for number in range(100):
            tell_from_here(a, str(number))
        a.heal()
        tell_from_here(a, "end")
        assert 20 <= len(heard(at_a, "end")) <= 80  # six standard deviations
    with pytest.raises(ValueError, match="between 0 and 1"):
        a.lose(2)


def test_a_host_vanishes_without_a_word(network: Network) -> None:
    a = network.hosts[0]
    with running(a, ECHO) as server, socket.create_connection((a.address, PORT), timeout=SILENCE_S) as link:
        link.sendall(b"here")
        assert link.recv(9) == b"here"
        a.kill_all()
        assert (server.returncode, a.pids()) == (-9, [])
        with pytest.raises(TimeoutError):
            link.recv(9)


def test_two_networks_at_once(network: Network) -> None:
    with Network(2) as other:
        for hosts_of_one in (network.hosts, other.hosts):
            a, b = hosts_of_one[:2]
            with running(a, ECHO):
                assert ask(b, a) == f"asked {a.address}"
        assert not {host.address for host in network.hosts} & {host.address for host in other.hosts}
    assert not left_of(other)
    assert left_of(network)


def test_a_name_or_address_that_somebody_has_is_left_alone(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    there = len(left_of(network))
    assert there == 7  # a bridge, and three interfaces and namespaces
    monkeypatch.setattr(secrets, "randbelow", lambda _: int(network.bridge[2:], 16))
    monkeypatch.setattr(hosts, "TRIES", 3)
    with pytest.raises(OSError, match="no network 10"):
        hosts._take_bridge()
    monkeypatch.setattr(hosts, "_in_use", lambda _: False)
    with pytest.raises(hosts.CommandFailed, match="File exists"):
        hosts._take_bridge()
    assert len(left_of(network)) == there


def test_nothing_is_left_behind() -> None:
    with pytest.raises(KeyboardInterrupt), Network(2) as other:
        stubborn = [start(host, STUBBORN) for host in other.hosts]
        late = other.hosts[0].popen(["sleep", "1000"])  # may not be in its namespace yet
        other.hosts[1].cut()
        raise KeyboardInterrupt
    assert not left_of(other)
    assert late.returncode == -9
    for process in stubborn:
        assert process.returncode == -9
        assert process.communicate(timeout=PATIENCE_S)[0] == ""  # at its end: nobody else holds it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_by_a_killed_process(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(ROOT)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        network = Network(2)
        network.bridge = owner.stdout.readline().strip()
        assert left_of(network)
        owner.send_signal(number)
        owner.wait(PATIENCE_S)
    give_up_at = time.monotonic() + PATIENCE_S
    while left_of(network):
        assert time.monotonic() < give_up_at, left_of(network)
        time.sleep(0.01)


def test_half_a_network_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    run = hosts._run

    def failing(command: Any, **options: Any) -> Any:
        """Fails when the second host gets its address."""
        if command[3:5] == ["addr", "add"] and command[2].endswith("-2"):
            names.append(command[2][:-2])
            command = ["false"]
        return run(command, **options)

    monkeypatch.setattr(hosts, "_run", failing)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="`false` ended with 1"):
        hosts._keep(2)
    network = Network(2)
    (network.bridge,) = names
    assert not left_of(network)
