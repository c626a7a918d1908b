"""What the tests with real training jobs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks import hosts
from benchmarks.hosts import Network

from integration.harness import TrainingJob
from integration.launch_tools import Job


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where no hosts can be made of network namespaces, and says why; that counts as a missing program."""
    reason = hosts.unavailable()
    if reason:
        pytest.skip(f"missing program or permission: {reason}")


@pytest.fixture
def network(namespaces: None) -> Iterator[Network]:
    with Network(3) as network:
        yield network


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache_home: Path) -> Callable[[int], str]:
    """The hash of the weights after a number of steps in a world of one where nothing fails."""
    known: dict[int, str] = {}

    def weights(steps: int) -> str:
        if steps not in known:
            job = TrainingJob(tmp_path_factory.mktemp(f"undisturbed-{steps}"), 1, steps=steps)
            try:
                known[steps] = job.finish()["weights_sha256"]
            finally:
                job.close()
        return known[steps]

    return weights


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., TrainingJob]]:
    jobs: list[TrainingJob] = []

    def begin(*arguments: object, **settings: object) -> TrainingJob:
        jobs.append(TrainingJob(tmp_path / str(len(jobs)), *arguments, **settings))  # type: ignore[arg-type]
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs of made-up workers."""
    jobs: list[Job] = []

    def begin(*arguments: object, **settings: object) -> Job:
        jobs.append(Job(tmp_path / "run", *arguments, **settings))  # type: ignore[arg-type]
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
