"""Servers that speak S3, for tests of object storage; a check that a test leaves no descriptor open."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import s3_server

_NUMBERS = itertools.count()
CLOSED_S = 5.0


@pytest.fixture
def no_descriptor_is_left() -> Iterator[None]:
    """Check that what the test opened is closed, if only a moment later by a thread that ends. What earlier tests
    left to the garbage collector may end meanwhile."""
    gc.collect()
    before = _descriptors()
    yield
    end = time.monotonic() + CLOSED_S
    while (left := _descriptors() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, sorted(left)


def _descriptors() -> set[tuple[str, str]]:
    """The number of every open descriptor and what it leads to."""
    found = set[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one with which the folder itself was read is closed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which clients find moto's server."""
    pytest.importorskip("moto")
    with s3_server.serving(tmp_path_factory.mktemp("moto")) as variables:
        yield variables


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which clients find a real S3 server. Skips if it is not installed."""
    pytest.importorskip("boto3")
    missing = s3_server.radosgw_missing()
    if missing and os.environ.get("ELASTIC_HARNESS_RADOSGW") != "1":
        pytest.skip(f"no {', '.join(missing)}: apt install radosgw ceph-mon ceph-osd ceph-mgr")
    for _ in range(2):  # it is a whole cluster, which does not come up every time on a busy machine
        with ExitStack() as running:
            try:
                variables = running.enter_context(s3_server.serving(tmp_path_factory.mktemp("ceph"), "radosgw"))
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                why = str(error)[-300:]
                continue
            yield variables
            return
    pytest.skip(f"radosgw did not come up: {why}")


@pytest.fixture(params=["moto", pytest.param("radosgw", marks=pytest.mark.slow)])
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place on a server, with the environment set so that clients find it."""
    pytest.importorskip("obstore")
    for name, value in request.getfixturevalue(request.param).items():
        monkeypatch.setenv(name, value)
    return f"{s3_server.URL}/{next(_NUMBERS)}"
