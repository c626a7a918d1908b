"""Several hosts on one machine: Linux network namespaces on a bridge, whose network and processes can be taken away.

    with Network(3) as network:
        server, client, _ = network.hosts
        process = server.popen(["etcd", ...])
        server.cut()

Needs root, `ip` (iproute2) and `nft` (nftables). The hosts share all but the network: files, process ids, the clock.
Everything is made and, in the end, removed by a process of its own, the keeper, which no Ctrl-C reaches. It waits until
the block ends, or this process does, however that ends.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

KILL_S = 10.0
TRIES = 50
HOSTS_MAX = 253
_INTERFACES, _NAMESPACES = Path("/sys/class/net"), Path("/var/run/netns")
_TABLE = """\
add table inet hosts
add chain inet hosts in { type filter hook input priority 0; }
add chain inet hosts out { type filter hook output priority 0; }
"""


class CommandFailed(subprocess.CalledProcessError):
    """A command ended with an error; the message has its last words."""

    def __str__(self) -> str:
        said = f"{self.stderr or ''}{self.stdout or ''}".strip()
        return f"`{' '.join(map(str, self.cmd))}` ended with {self.returncode}: {said[-600:]}"


@dataclass(frozen=True)
class Host:
    """A network namespace with one address. Made by Network."""

    name: str
    address: str
    _processes: list[subprocess.Popen[Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a process, in a session of its own; `options` as Popen's."""
        process = subprocess.Popen(self._inside(command), **{"start_new_session": True, **options})
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with what it wrote as text. Raises CommandFailed; `options` as subprocess.run's."""
        return _run(self._inside(command), **options)

    def pids(self) -> list[int]:
        """The processes in it, without those that have ended and are not waited for."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill_all(self) -> None:
        """The host vanishes: its network is cut, so that no peer hears of it, then all its processes are killed; blocks
        until they have ended, at most KILL_S. Cut until `heal`; after that the kernel still says goodbye to old peers.
        """
        self.cut()
        self._end()

    def cut(self, to: Host | None = None) -> None:
        """Drop every packet from and to it but its own loopback's; `to`: only packets that it sends to that host.
        Nobody is told: connections go silent, and as ARP is still answered there is no "no route to host" either. But a
        datagram that a process in it sends is refused (EPERM)."""
        if to is not None:
            self._filter(f"out ip daddr {to.address} drop")
        else:
            self._filter('in iifname != "lo" drop', 'out oifname != "lo" drop')

    def lose(self, share: float) -> None:
        """Drop this share of the packets that reach it, at random."""
        if not 0 < share < 1:
            raise ValueError(f"lose: share is {share}, must be between 0 and 1; to lose all, cut")
        self._filter(f'in iifname != "lo" numgen random mod 1000000 < {max(1, int(share * 1_000_000))} drop')

    def heal(self) -> None:
        """Undo all that `cut` and `lose` did."""
        self.run(["nft", "-f", "-"], input=_TABLE + "delete table inet hosts\n")

    def _inside(self, command: Sequence[str | Path]) -> list[str | Path]:
        return ["ip", "netns", "exec", self.name, *command]

    def _filter(self, *rules: str) -> None:
        """Add rules to those there are, all of them at one instant."""
        self.run(["nft", "-f", "-"], input=_TABLE + "".join(f"add rule inet hosts {rule}\n" for rule in rules))

    def _end(self) -> None:
        """Kill all processes, and those that they start meanwhile. Raises TimeoutError after KILL_S."""
        if not (_NAMESPACES / self.name).exists():
            return
        give_up_at = time.monotonic() + KILL_S
        while True:
            for process in self._processes:
                process.kill()  # one that was just started may not be in the namespace yet
            pids = self.pids()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids and all(process.poll() is not None for process in self._processes):
                return
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"processes {pids} of {self.name} still live {KILL_S:g} s after SIGKILL")
            time.sleep(0.002)

    def _delete(self) -> None:
        """Whatever there is of it. Left to itself its interface would stay until the last connection has died."""
        if (_INTERFACES / self.name).exists():
            _ip("link", "del", self.name)
        if (_NAMESPACES / self.name).exists():
            _ip("netns", "del", self.name)


class Network:
    """`count` hosts, eh<number>-1 and so on, that reach each other and this machine. Many networks may exist at once:
    whoever holds the bridge eh<number>, of which the kernel allows one, also holds the names that begin so and the
    addresses 10.x.y.0/24, where x and y are the two bytes of the number and this machine has .254."""

    def __init__(self, count: int) -> None:
        if not 1 <= count <= HOSTS_MAX:
            raise ValueError(f"Network: count is {count}, must be 1 to {HOSTS_MAX}")
        self.count = count
        self.bridge = ""
        self.hosts: tuple[Host, ...] = ()
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        command, pipe = [sys.executable, "-I", __file__, str(self.count)], subprocess.PIPE
        try:
            self._keeper = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
            assert self._keeper.stdout is not None
            self.bridge = self._keeper.stdout.readline().strip()
            if not self.bridge:
                raise OSError(f"hosts cannot be made here: {self._keeper.communicate()[1].strip()}")
            self.hosts = _hosts(self.bridge, self.count)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def machine(self) -> Host:
        """This machine, as the hosts reach it: for an address to cut."""
        return Host("", f"{_prefix(self.bridge)}.254")

    def close(self) -> None:
        """Kill all processes in the hosts, wait for them, and remove the hosts and the bridge."""
        try:
            self._close()
        except BaseException:  # an impatient Ctrl-C
            self._close()
            raise

    def _close(self) -> None:
        processes = [process for host in self.hosts for process in host._processes]
        for process in processes:
            process.kill()  # one that was just started may not be in its namespace yet
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            with suppress(OSError, ValueError):  # it has ended, or was told
                self._keeper.stdin.write("end\n")  # forks of this process may hold the pipe open
            said = self._keeper.communicate()[1]
            if self._keeper.returncode != 0 and self.hosts:
                raise OSError(f"{self.bridge} was not removed: {said.strip()}")
        for process in processes:
            process.wait(KILL_S)


def _keep(count: int) -> None:
    """The keeper: makes a network, writes the name of its bridge, and removes it when its input has a line or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        bridge = _take_bridge()
        try:
            _ip("addr", "add", f"{_prefix(bridge)}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for host in _hosts(bridge, count):
                _connect(host, bridge)
            print(bridge, flush=True)
            sys.stdin.readline()
        finally:
            _remove(bridge, count)
    except (OSError, CommandFailed) as error:
        sys.exit(str(error))


def _take_bridge() -> str:
    """Make a bridge of a name and for an address that nobody has."""
    refused: Exception = OSError("no network 10.x.y.0/24 was found that this machine has no part of")
    for _ in range(TRIES):
        bridge = f"eh{secrets.randbelow(1 << 16):04x}"
        if _in_use(f"{_prefix(bridge)}.254/24"):
            continue
        try:
            _ip("link", "add", bridge, "type", "bridge")
            return bridge
        except CommandFailed as error:  # somebody has the name, or bridges are not allowed
            refused = error
    raise refused


def _connect(host: Host, bridge: str) -> None:
    _ip("netns", "add", host.name)
    _ip("link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "link", "set", "eth0", "up")
    _ip("link", "set", host.name, "master", bridge, "up")


def _remove(bridge: str, count: int) -> None:
    """All that there is; the bridge, which holds the names, last. Raises the first thing that went wrong."""
    errors: list[Exception] = []
    for host in _hosts(bridge, count):
        for part in (host._end, host._delete):
            try:
                part()
            except (OSError, CommandFailed) as error:
                errors.append(error)
    _ip("link", "del", bridge)
    if errors:
        raise errors[0]


def _hosts(bridge: str, count: int) -> tuple[Host, ...]:
    return tuple(Host(f"{bridge}-{number}", f"{_prefix(bridge)}.{number}") for number in range(1, count + 1))


def _prefix(bridge: str) -> str:
    high, low = bytes.fromhex(bridge[2:])
    return f"10.{high}.{low}"


def unavailable() -> str:
    """Why no hosts can be made here; empty if they can. Makes one to see."""
    if os.geteuid() != 0:
        return "hosts need root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"hosts need `{program}`: apt install {package}"
    try:
        with Network(1) as network:
            network.hosts[0].cut()
    except (OSError, CommandFailed) as error:
        return str(error)
    return ""


def _in_use(address: str) -> bool:
    """Whether an interface of this machine has an address in the network of this one."""
    wanted = ipaddress.ip_interface(address).network
    lines = _ip("-o", "-4", "addr", "show").splitlines()
    return any(ipaddress.ip_interface(line.split()[3]).network.overlaps(wanted) for line in lines)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments]).stdout


def _run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, **options)
    if done.returncode != 0:
        raise CommandFailed(done.returncode, done.args, done.stdout, done.stderr)
    return done


if __name__ == "__main__":
    _keep(int(sys.argv[1]))
