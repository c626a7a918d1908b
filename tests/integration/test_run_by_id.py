"""Commands on a run that trains or was stopped, which is named by its id."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from integration.harness import TINY
from integration.launch_tools import Job, run

pytestmark = pytest.mark.slow


def test_generate_and_verify_while_a_run_trains_and_after_a_stop(tmp_path: Path, cache_home: Path) -> None:
    words = (*TINY, "training.max_steps=100000", "checkpoint.checkpoint_interval=5")
    job = Job(tmp_path / "runs" / "first", *words, script=Path("elastic_harness.train"), options=("-m",))
    try:
        job.until_event("checkpoint_saved")
        training = run("generate", "first", "--tokens", 5, cwd=tmp_path)
        assert training.returncode == 0 and training.stdout.startswith("def "), training.stderr
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.output
    finally:
        job.close()
    stopped = run("generate", "first", "--tokens", 5, cwd=tmp_path)
    assert stopped.returncode == 0 and stopped.stdout.startswith("def "), stopped.stderr
    assert run("verify", "first", cwd=tmp_path).returncode == 0
