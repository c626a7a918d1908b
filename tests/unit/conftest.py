"""A server that speaks S3, for tests of object storage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import s3_server


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, with the environment set so that clients find the server (moto's)."""
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with s3_server.serving(tmp_path / "moto.log") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield s3_server.URL
