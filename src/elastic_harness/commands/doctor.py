"""`elastic-harness doctor`: checks what a run needs of this machine, before it is needed, and says how to mend it.

    elastic-harness doctor                                          this machine alone
    elastic-harness doctor --run-dir /nvme/runs --store etcd://10.0.0.1:2379,10.0.0.2:2379
    elastic-harness doctor --peer 10.0.0.2:29400                    can that be reached?

Every line is fine (ok), worth a look (warn) or in the way of a run (FAIL), and says what to do. The command writes one
temporary file below --run-dir, and removes it. The exit code is 4 if something is in the way of a run, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import json
import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from elastic_harness.contract import shared_frames
from elastic_harness.errors import EXIT_INFRASTRUCTURE, ConfigError, HarnessError

Verdict = Literal["ok", "warn", "FAIL"]
TORCH_MIN = (2, 6)
SHARED_MEMORY_MIN = 1 << 30
OPEN_FILES_MIN = 4096
DISK_FREE_MIN = 10 << 30
DISK_TEST_BYTES = 128 << 20
DISK_SLOW = 100e6  # bytes per second, written and synced
SYNC_SLOW_S = 0.1
SKEW_MAX_S = 2.0  # the store's clock is known to a second
STORE_SLOW_S = 0.05
CONNECT_S = 3.0
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre")


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, and what to do if it is not well."""

    name: str
    verdict: Verdict
    what: str
    fix: str = ""


def judged(name: str, fine: bool, what: str, fix: str, otherwise: Verdict = "warn") -> Finding:
    return Finding(name, "ok", what) if fine else Finding(name, otherwise, what, fix)


def check_torch() -> Iterator[Finding]:
    """Check torch, and the transport of tensors between workers."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("torch", "FAIL", str(error), "pip install 'torch>=2.6'")
        return
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield judged("torch", found >= TORCH_MIN, torch.__version__, "pip install 'torch>=2.6'", "FAIL")
    gloo = dist.is_available() and dist.is_gloo_available()
    fix = "Install a build of torch that has it, or do without copies of a process group's snapshots on other nodes."
    yield judged("gloo", gloo, "there" if gloo else "missing", fix)
    if torch.cuda.is_available():
        nccl = dist.is_available() and dist.is_nccl_available()
        what = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, NCCL {'there' if nccl else 'missing'}"
        yield judged("gpu", nccl, what, "training.backend=tcp works without NCCL.")
    else:
        yield Finding("gpu", "ok", "none that torch can use: training runs on the CPU")


def check_memory() -> Iterator[Finding]:
    """Check shared memory for snapshots and data loaders, and the limit of open files."""
    try:
        for descriptor in shared_frames.create():
            os.close(descriptor)
        yield Finding("memfd", "ok", "snapshots in shared memory are possible")
    except OSError as error:
        yield Finding("memfd", "FAIL", f"{error.strerror}", "Allow memfd_create in the container's seccomp profile.")
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total
        fix = (
            "Data loaders' worker processes need more: docker run --shm-size=8g; in Kubernetes an emptyDir with "
            "medium: Memory on /dev/shm."
        )
        yield judged("/dev/shm", size >= SHARED_MEMORY_MIN, gib(size), fix)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= OPEN_FILES_MIN
    yield judged("open files", enough, str(files), f"ulimit -n {OPEN_FILES_MIN * 16}")


def check_disk(folder: Path) -> Iterator[Finding]:
    """Check the place where runs are kept: room, speed, and how long a sync takes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        speed, sync_s = disk_speed(folder)
    except OSError as error:
        yield Finding("run folder", "FAIL", f"{folder}: {error.strerror}", "Choose another --run-dir, or free space.")
        return
    fix = "A checkpoint with AdamW takes about 12 bytes for each parameter; checkpoint.keep_last of them stay."
    yield judged("disk space", free >= DISK_FREE_MIN, f"{gib(free)} free in {folder}", fix)
    kind = file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        fix = "Set checkpoint.nvme_path to a local disk: this one is on the network."
        yield Finding("file system", "warn", kind, fix)
    what = f"{speed / 1e6:.0f} MB/s written and synced, {1e3 * sync_s:.1f} ms for a small sync"
    fix = "Set checkpoint.nvme_path to a faster disk, or raise checkpoint.checkpoint_interval."
    yield judged("disk speed", speed >= DISK_SLOW and sync_s <= SYNC_SLOW_S, what, fix)


def disk_speed(folder: Path) -> tuple[float, float]:
    """Return bytes per second of one large file, sync included, and the median seconds of syncing a small one."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begun = time.perf_counter()
        for _ in range(DISK_TEST_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        speed = DISK_TEST_BYTES / (time.perf_counter() - begun)
        syncs = []
        for _ in range(9):
            begun = time.perf_counter()
            file.write(b"x")
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - begun)
    return speed, statistics.median(syncs)


def file_system(folder: Path) -> str:
    """Return the type of the file system, as the kernel names it; empty if it is unknown."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, name, *_ = line.split()
            inside = place == "/" or f"{folder.resolve()}/".startswith(f"{place}/")
            if inside and len(place) >= len(best):
                best, kind = place, name
    return kind


def check_network(peers: Sequence[str]) -> Iterator[Finding]:
    """Check the address that other machines would use, and whether the given addresses can be reached."""
    host, address = socket.gethostname(), "127.0.0.1"
    try:
        address = socket.gethostbyname(host)
        own = "" if not address.startswith("127.") else ", which only this machine can reach"
        yield Finding("host name", "ok", f"{host} is {address}{own}")
    except OSError:
        yield Finding("host name", "warn", f"{host} has no address", f"echo '127.0.1.1 {host}' >> /etc/hosts")
    try:
        with socket.create_server((address, 0)) as listener:
            socket.create_connection(listener.getsockname(), CONNECT_S).close()
        yield Finding("ports", "ok", f"a port on {address} can be opened and reached")
    except OSError as error:
        yield Finding("ports", "FAIL", f"{address}: {error}", "Let the firewall allow this machine to reach itself.")
    for peer in peers:
        yield _peer(peer)


def _peer(peer: str) -> Finding:
    name, _, port = peer.rpartition(":")
    if not name or not port.isdigit():
        raise ConfigError(f"--peer is {peer}; it must be HOST:PORT.")
    begun = time.perf_counter()
    try:
        socket.create_connection((name, int(port)), CONNECT_S).close()
    except ConnectionRefusedError:
        fix = f"Run `nc -l {port}` there and try again."
        return Finding(f"peer {peer}", "warn", "the machine answers, but nothing listens there", fix)
    except OSError as error:
        fix = f"Open {port}/tcp between the machines, both ways, and check the address."
        return Finding(f"peer {peer}", "FAIL", str(error), fix)
    return Finding(f"peer {peer}", "ok", f"reached in {1e3 * (time.perf_counter() - begun):.1f} ms")


def check_store(text: str) -> Iterator[Finding]:
    """Check each member of the store: whether it answers, how fast, and what time it has."""
    from elastic_harness.etcd.address import Address
    from elastic_harness.etcd.gateway import Gateway
    from elastic_harness.etcd.store import EtcdStore

    address = Address.parse(text)
    for endpoint in address.endpoints:
        name, gateway = f"store {endpoint}", Gateway(replace(address, endpoints=(endpoint,)), CONNECT_S)
        store = EtcdStore(gateway)
        try:
            version = gateway.call("maintenance/status", {}).get("version")
            took = []
            for _ in range(9):
                begun = time.perf_counter()
                store.revision  # noqa: B018  (a read that a majority of members confirms)
                took.append(time.perf_counter() - begun)
            store.revoke(store.lease(5.0))
        except HarnessError as error:
            yield Finding(name, "FAIL", str(error), "Start it, or open its port (2379/tcp) towards this machine.")
            continue
        median_s = statistics.median(took)
        fix = "Have etcd on a disk of its own (SSD), near the workers."
        yield judged(name, median_s <= STORE_SLOW_S, f"etcd {version}, {1e3 * median_s:.1f} ms for a read", fix)
        date = gateway.date()
        if date is not None:
            yield _clock(endpoint, time.time() - 0.5 - email.utils.parsedate_to_datetime(date).timestamp())


def _clock(endpoint: str, ahead_s: float) -> Finding:
    """Compare this machine's clock with the store's, to the second."""
    same = abs(ahead_s) <= SKEW_MAX_S
    what = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} {endpoint}"
    fix = (
        "systemctl enable --now systemd-timesyncd (or chronyd). The protocol does not depend on clocks; events of "
        "several machines are sorted by them."
    )
    return judged("clock", same, f"as that of {endpoint}" if same else what, fix)


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="elastic-harness doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will be kept (%(default)s)")
    parser.add_argument("--store", help="the store's address, such as etcd://10.0.0.1:2379")
    parser.add_argument("--peer", action="append", default=[], metavar="HOST:PORT", help="another machine; repeatable")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given = parser.parse_args(argv)
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_torch,
        check_memory,
        lambda: check_disk(given.run_dir),
        lambda: check_network(given.peer),
    ]
    if given.store:
        checks.append(lambda: check_store(given.store))
    made = not given.run_dir.exists()
    findings = []
    try:
        for check in checks:
            for finding in check():
                findings.append(finding)
                if not given.json:
                    print(f"{finding.verdict:4}  {finding.name}: {finding.what}", flush=True)
                    if finding.fix:
                        print(f"      → {finding.fix}", flush=True)
    finally:
        if made:
            with contextlib.suppress(OSError):
                given.run_dir.rmdir()
    failed = [finding for finding in findings if finding.verdict == "FAIL"]
    if given.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    elif failed:
        print(f"{len(failed)} in the way of a run: {', '.join(finding.name for finding in failed)}")
    return EXIT_INFRASTRUCTURE if failed else 0
