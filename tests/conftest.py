"""What all tests share: a clean environment, and skips that may not hide a missing system program."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Timing of a shared machine says nothing about the code; every failure prints the blob that repeats it.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

STRICT = os.environ.get("ELASTIC_HARNESS_CI") == "1"
MISSING_PROGRAM = "missing program"  # skip reasons for a system program that is not installed start so


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under ELASTIC_HARNESS_CI=1 a test skipped for a missing system program fails."""
    report = yield
    if (
        STRICT
        and report.skipped
        and isinstance(report.longrepr, tuple)
        and MISSING_PROGRAM in report.longrepr[2]
    ):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needs a program that is not installed: {report.longrepr[2]}"
    return report


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps tests, and the processes they start, away from the user's cache; the corpus is copied once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
