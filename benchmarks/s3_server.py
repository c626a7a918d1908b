"""S3 servers for benchmarks and tests, on this machine and with one empty bucket: Ceph's `radosgw`, which is a real
one, where it is installed (Debian: radosgw ceph-mon ceph-osd ceph-mgr), and moto's, which pretends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOTO = "from moto.server import main; main(['-p', '0', '-H', '127.0.0.1'])"
URL = "s3://bucket"
KEY = "made-up"
PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-mgr", "monmaptool")
PATIENCE_S = 45.0
CEPH_CONF = """\
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon}
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 8G
run dir = {folder}/run
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw data = {folder}/rgw
"""


def radosgw_missing() -> list[str]:
    """The programs that radosgw needs and that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def serving(folder: Path, kind: str = "moto") -> Iterator[dict[str, str]]:
    """The environment in which clients find a server, `moto` or `radosgw`, with the bucket of `URL`. `folder`: for its
    files; must be there. The server ends with the block."""
    with (_moto if kind == "moto" else _radosgw)(folder) as address:
        variables = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
        }
        yield variables


def make_bucket(address: str, name: str) -> None:
    """An empty bucket on the server."""
    import boto3

    options = {"aws_access_key_id": KEY, "aws_secret_access_key": KEY, "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **options).create_bucket(Bucket=name)


@contextmanager
def _moto(folder: Path) -> Iterator[str]:
    log = folder / "moto.log"
    with open(log, "w") as output:
        process = subprocess.Popen([sys.executable, "-c", MOTO], stdout=output, stderr=subprocess.STDOUT)
    try:
        end, address = time.monotonic() + PATIENCE_S, ""
        while not address:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
            address = next((word for word in log.read_text().split() if word.startswith("http://127.0.0.1")), "")
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", b"", method="PUT")).close()
        yield address
    finally:
        process.kill()
        process.wait()


@contextmanager
def _radosgw(folder: Path) -> Iterator[str]:
    """A cluster of one node with its data in memory, as the user who calls; needs no root."""
    mon, rgw = _free_port(), _free_port()
    for name in ("mon", "mgr", "osd", "run", "log", "rgw"):
        (folder / name).mkdir()
    conf = folder / "ceph.conf"
    fsid = str(uuid.uuid4())
    conf.write_text(CEPH_CONF.format(fsid=fsid, mon=mon, rgw=rgw, folder=folder))
    processes: list[subprocess.Popen[bytes]] = []
    log = open(folder / "output.log", "wb")

    def run(*words: str) -> None:
        done = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{' '.join(words)}:\n{(folder / 'output.log').read_text()[-3000:]}"

    def start(*words: str) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        return processes[-1]

    ceph = ("-c", str(conf))
    try:
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon}]", str(folder / "monmap"))
        run("ceph-mon", *ceph, "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        start("ceph-mon", *ceph, "-i", "a", "-f")
        osd = str(uuid.uuid4())
        run("ceph", *ceph, "--connect-timeout", "30", "osd", "new", osd)
        start("ceph-mgr", *ceph, "-i", "x", "-f")
        run("ceph-osd", *ceph, "-i", "0", "--mkfs", "--osd-uuid", osd)
        storing = start("ceph-osd", *ceph, "-i", "0", "-f")
        start("radosgw", *ceph, "-n", "client.rgw", "-f")
        address, end = f"http://127.0.0.1:{rgw}", time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address).close()
                break
            if storing.poll() is not None:  # the monitor may not know it yet
                processes.remove(storing)
                time.sleep(1.0)
                storing = start("ceph-osd", *ceph, "-i", "0", "-f")
            ended = [process.args for process in processes if process.poll() is not None]
            said = (folder / "output.log").read_text()[-3000:]
            assert not ended and time.monotonic() < end, f"{ended} ended:\n{said}"
            time.sleep(0.1)
        user = ("user", "create", "--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret={KEY}")
        run("radosgw-admin", *ceph, *user)
        make_bucket(address, "bucket")
        yield address
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
