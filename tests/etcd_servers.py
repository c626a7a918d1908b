"""Real etcds for tests: one or several members on loopback, that can be killed, stopped, paused and started again."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_harness.etcd.address import Address
from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.server import find_etcd
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership.store import Change, Unavailable, Watch

VERSIONS = ("3.4", "3.5")
START_S = 30.0
PATIENCE_S = 60.0


def program(version: str) -> str:
    """An etcd of this version. Skips if there is none."""
    variable = f"ELASTIC_HARNESS_ETCD_{version.replace('.', '')}"
    candidate = os.environ.get(variable) or find_etcd()
    said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=True).stdout
    if f"etcd Version: {version}." not in said:
        pytest.skip(f"no etcd {version}: name one in {variable}")
    return candidate


def free_ports(count: int, *hosts: str) -> list[int]:
    """So many ports, the first on the first of these addresses, and so on; the others on the loopback one."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock, host in itertools.zip_longest(sockets, hosts, fillvalue="127.0.0.1"):
            sock.bind((host, 0))  # type: ignore[union-attr]
        return [sock.getsockname()[1] for sock in sockets]


def polled(watch: Watch, count: int) -> list[Change]:
    """The next changes; those of a server may take a moment. One too many is seen too."""
    changes: list[Change] = []
    give_up_at = time.monotonic() + PATIENCE_S
    while len(changes) < count and time.monotonic() < give_up_at:
        changes += watch.poll()
        time.sleep(0.002)
    time.sleep(0.05)
    return changes + watch.poll()


def certificates(folder: Path, host: str, client: str = "/O=client") -> tuple[list[str], str]:
    """Certificates for an etcd on `host` and for its clients, below `folder`: the options of the one, and what follows
    the `?` in the address for the others. `client`: the subject of the latter. Skips without openssl."""
    made = [
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        f"req -newkey rsa:2048 -nodes -keyout {{0}}.key -out {{0}}.csr -subj {{1}} -addext subjectAltName=IP:{host}",
        "x509 -req -in {0}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {0}.pem -days 2 -copy_extensions copy",
    ]
    each = [line.format(*who) for who in (("server", "/CN=server"), ("client", client)) for line in made[1:]]
    for command in (made[0], *each):
        try:
            subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("missing program openssl")
    options = ["--cert-file", f"{folder}/server.pem", "--key-file", f"{folder}/server.key"]
    options += ["--trusted-ca-file", f"{folder}/ca.pem", "--client-cert-auth"]
    return options, f"ca={folder}/ca.pem&cert={folder}/client.pem&key={folder}/client.key"


def want_password(cluster: Cluster, password: str) -> None:
    """From now on nobody is let in but the user root with this password."""
    root = Gateway(cluster.address)
    root.call("auth/role/add", {"name": "root"})
    root.call("auth/user/add", {"name": "root", "password": password})
    root.call("auth/user/grant", {"user": "root", "role": "root"})
    root.call("auth/enable", {})


class Member:
    def __init__(self, command: Sequence[str], endpoint: str, log: Path) -> None:
        self.endpoint = endpoint
        self._command = list(command)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait()
            self._process = None


class Cluster:
    """`members` of one etcd; a context in which it answers. Leases of 1 s and more are possible. `options`: of each,
    TLS for its clients for example. `host`: the address on which they listen to clients. `query`: what follows the `?`
    in their address."""

    def __init__(
        self,
        folder: Path,
        version: str = "3.5",
        members: int = 1,
        options: Sequence[str] = (),
        host: str = "127.0.0.1",
        query: str = "",
    ) -> None:
        self.folder = folder
        self._query = query
        tls = any(option.startswith("--cert-file") for option in options)
        ports = free_ports(2 * members, *[host] * members)
        scheme = "https" if tls else "http"
        peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        known = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        self.members = []
        for number, peer in enumerate(peers):
            endpoint = f"{scheme}://{host}:{ports[number]}"
            command = [program(version), "--name", f"m{number}", "--data-dir", str(folder / f"m{number}"), *options]
            command += ["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", known]
            command += ["--heartbeat-interval", "50", "--election-timeout", "500", "--logger", "zap"]
            self.members.append(Member(command, endpoint, folder / f"m{number}.log"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    @property
    def url(self) -> str:
        scheme = self.endpoints[0].partition("://")[0].replace("http", "etcd")
        hosts = ",".join(endpoint.partition("//")[2] for endpoint in self.endpoints)
        return f"{scheme}://{hosts}" + (f"?{self._query}" if self._query else "")

    @property
    def address(self) -> Address:
        return Address.parse(self.url)

    def __enter__(self) -> Cluster:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for member in self.members:
            member.start()

    def wait(self, address: Address | None = None) -> None:
        """Block until it answers."""
        give_up_at = time.monotonic() + START_S
        store = EtcdStore(Gateway(address or self.address, timeout_s=1.0))
        while True:
            try:
                store.revision  # noqa: B018
                return
            except Unavailable:
                assert time.monotonic() < give_up_at, "etcd does not come up"
                time.sleep(0.02)

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def lose_data(self) -> None:
        for number in range(len(self.members)):
            shutil.rmtree(self.folder / f"m{number}")
