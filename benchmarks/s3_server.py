"""An S3 server for benchmarks and tests: moto's, in a process of its own, with one empty bucket."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOTO = "from moto.server import main; main(['-p', '0', '-H', '127.0.0.1'])"
URL = "s3://bucket"


@contextmanager
def serving(log: Path) -> Iterator[dict[str, str]]:
    """The environment in which clients find the server. It ends with the block."""
    with open(log, "w") as output:
        process = subprocess.Popen([sys.executable, "-c", MOTO], stdout=output, stderr=subprocess.STDOUT)
    try:
        end, address = time.monotonic() + 60, ""
        while not address:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
            address = next((word for word in log.read_text().split() if word.startswith("http://127.0.0.1")), "")
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", b"", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "made-up",
            "AWS_SECRET_ACCESS_KEY": "made-up",
        }
    finally:
        process.kill()
        process.wait()
