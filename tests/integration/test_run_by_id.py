"""Commands on a run that trains or was stopped, which is named by its id."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from integration.harness import TINY
from integration.launch_tools import Job
from integration.script_tools import forked

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """One command to its end, in the folder of the test."""
    return forked("-m", "elastic_harness", *arguments)


def test_generate_and_verify_while_a_run_trains_and_after_a_stop(tmp_path: Path, cache_home: Path) -> None:
    words = (*TINY, "training.max_steps=100000", "checkpoint.checkpoint_interval=5")
    job = Job(tmp_path / "runs" / "first", *words, script=Path("elastic_harness.train"), options=("-m",))
    try:
        job.until_event("checkpoint_saved")
        training = run("generate", "first", "--tokens", 5)
        assert training.returncode == 0 and training.stdout.startswith("def "), training.stderr
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.output
    finally:
        job.close()
    stopped = run("generate", "first", "--tokens", 5)
    assert stopped.returncode == 0 and stopped.stdout.startswith("def "), stopped.stderr
    assert run("verify", "first").returncode == 0


def test_a_run_that_an_earlier_version_recorded_is_resumed(tmp_path: Path, cache_home: Path) -> None:
    """When the trainer's settings were in the section `training`, and its model in another module."""
    words = (*TINY, "training.max_steps=3", "trainer.precision=bf16")
    launched = run("launch", "--run-dir", "runs/first", "-m", "elastic_harness.train", *words)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    record = tmp_path / "runs" / "first" / "run.json"
    earlier = record.read_text().replace("trainer.", "training.").replace("gpt.model.GPT", "models.gpt.GPT")
    assert earlier.count("training.precision=bf16") == 2 and earlier.count("models.gpt.GPT") == 1
    record.write_text(earlier)
    resumed = run("resume", "first", "training.max_steps=5")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    noted = json.loads(record.read_text())
    assert "trainer.precision=bf16" in noted["argv"] and noted["fingerprint"]["run.precision"] == "bf16"
    verified = run("verify", "first", "--json")
    assert verified.returncode == 0 and json.loads(verified.stdout)["steps"] == 5, verified.stdout
