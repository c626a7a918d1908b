"""A server that speaks S3, for tests of object storage."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

MOTO = "from moto.server import main; main(['-p', '0', '-H', '127.0.0.1'])"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, with the environment set so that clients find the server (moto's)."""
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    log = tmp_path / "moto.log"
    with open(log, "w") as output:
        process = subprocess.Popen([sys.executable, "-c", MOTO], stdout=output, stderr=subprocess.STDOUT)
    try:
        end, address = time.monotonic() + 60, ""
        while not address:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
            address = next((word for word in log.read_text().split() if word.startswith("http://127.0.0.1")), "")
        for name, value in {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "made-up",
            "AWS_SECRET_ACCESS_KEY": "made-up",
        }.items():
            monkeypatch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", b"", method="PUT")).close()
        yield "s3://bucket"
    finally:
        process.kill()
        process.wait()
