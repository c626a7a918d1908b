"""What all tests share: a clean environment, and skips that may not hide a missing system program."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Timing of a shared machine says nothing about the code; every failure prints the blob that repeats it.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

STRICT = os.environ.get("ELASTIC_HARNESS_CI") == "1"
TOGETHER = ("[radosgw", "::test_a_habit_that_changes_nothing")  # parts of the names of tests, a group each
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs real jobs, for `pytest -m "not integration"`. Slow tests come first: at the end, when processes
    run out of tests, there are only short ones."""
    for item in items:
        if item.path.parent.name in ("integration", "soak"):
            item.add_marker(pytest.mark.integration)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has one process run all tests that share what takes long to set up. pytest-xdist 3.8 tells them by their
    `xdist_group`, which it cannot any more under pytest 9.2."""
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((part for part in TOGETHER if part in nodeid), nodeid)

    return Together(config, log) if config.option.dist == "loadgroup" else None


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps tests, and the processes they start, away from the user's cache; the corpus is copied once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
