"""One script, three ways to start it, and the same weights at the end of each, whatever is killed on the way."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.processes import of_run
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import Job
from integration.script_tools import SCRIPTS, execute, failing, forked, launch, one_message, python, said

pytestmark = pytest.mark.slow
OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"
STEPS = ("--steps", 30)


def finished(run_dir: Path) -> dict[str, Any]:
    return [e for e in read_events(run_dir / "events.jsonl") if e["event"] == "run_finished"][-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("alone")
    ended = forked(OWN_LOOP, *STEPS, "--run-dir", folder)
    assert ended.returncode == 0, said(ended)
    assert "accuracy" in ended.stdout
    assert verify(folder).ok
    yield finished(folder)


def test_plain_python_resumes_where_the_last_checkpoint_was(tmp_path: Path, alone: dict[str, Any]) -> None:
    killed = forked(OWN_LOOP, *STEPS, "--run-dir", tmp_path, **failing("apply.finished step=26 kill"))
    assert killed.returncode == -9, said(killed)
    again = python(OWN_LOOP, *STEPS, "--run-dir", tmp_path)
    assert again.returncode == 0, said(again)
    (loaded,) = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "checkpoint_loaded"]
    assert loaded["step"] in (10, 20), "the checkpoint of step 20 may not have been durable yet"
    assert finished(tmp_path)["weights_sha256"] == alone["weights_sha256"]
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.lineage == 1, verdict


def test_plain_python_refuses_another_program_in_the_same_folder(tmp_path: Path) -> None:
    first = forked(OWN_LOOP, "--steps", 2, "--run-dir", tmp_path)
    assert first.returncode == 0, said(first)
    known = json.loads((tmp_path / "fingerprint.json").read_text())
    (tmp_path / "fingerprint.json").write_text(json.dumps({**known, "run.seed": 99}))
    other = forked(OWN_LOOP, "--steps", 2, "--run-dir", tmp_path)
    assert other.returncode == 2
    assert "run.seed: the run has 99, this process 1337" in one_message(other)


def test_our_launcher_recovers_in_place(tmp_path: Path, alone: dict[str, Any]) -> None:
    ended = launch(
        tmp_path / "run",
        OWN_LOOP,
        *STEPS,
        options=("--nproc-per-node", 2),
        **failing("slot.backward member=w1-1 step=12 kill"),
    )
    assert ended.returncode == 0, said(ended)
    assert ended.stdout.count("accuracy") == 1, "after the loop one worker is rank 0"
    assert finished(tmp_path / "run")["weights_sha256"] == alone["weights_sha256"]
    verdict = verify(tmp_path / "run")
    assert verdict.ok and verdict.lineage == 0, verdict


def test_without_assertions_nothing_changes(tmp_path: Path, alone: dict[str, Any]) -> None:
    """PYTHONOPTIMIZE=1, in the launcher, the agent and the workers: a death, a replay and a joiner."""
    ended = launch(
        tmp_path / "run",
        OWN_LOOP,
        *STEPS,
        options=("--nproc-per-node", 2),
        anew=True,
        PYTHONOPTIMIZE="1",
        **failing("exchange.header_sent member=w0-1 step=12 kill"),
    )
    assert ended.returncode == 0, said(ended)
    assert finished(tmp_path / "run")["weights_sha256"] == alone["weights_sha256"]
    assert verify(tmp_path / "run").ok


def test_forked_workers_end_on_the_same_weights(tmp_path: Path, alone: dict[str, Any]) -> None:
    run = tmp_path / "run"
    ended = launch(
        run,
        OWN_LOOP,
        *STEPS,
        options=("--nproc-per-node", 2),
        anew=True,
        **failing("slot.backward member=w1-1 step=12 kill"),
    )
    assert ended.returncode == 0, said(ended)
    assert finished(run)["weights_sha256"] == alone["weights_sha256"]
    started = [event for event in read_events(run / "events.jsonl") if event["event"] == "worker_started"]
    assert len(started) == 3 and all(event["forked"] for event in started)
    assert "torch.optim" in json.loads((run / "imports.json").read_text())["modules"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stop_while_workers_are_made_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    """While torch is imported for them, when some are forked, and when they import the script's own modules."""

    def started(job: Job) -> bool:
        return len(job.events("worker_started")) >= 2

    stages: list[Callable[[Job], bool]] = [
        lambda job: bool(job.events("run_started")),
        lambda job: (job.run_dir / "logs" / "fork-server.log").exists(),
        lambda job: any(time.time() - event["t"] > 1.5 for event in job.events("run_started")),
        started,
    ]
    for stage, reached in enumerate(stages):
        options = ("--nproc-per-node", 3, "--spares", 1)
        job = Job(tmp_path / f"run{stage}", *STEPS, script=OWN_LOOP, options=options)
        try:
            job.until(lambda job=job, reached=reached: reached(job), f"stage {stage}")
            assert reached is not started or len(of_run(job.run_dir)) > 3, "forked workers are told from others"
            job.send(number)
            assert job.process.wait(60) == code, job.shown()
            job.check_nothing_left()
        finally:
            job.close()


def test_all_workers_at_once_begin_again_at_the_checkpoint(tmp_path: Path, alone: dict[str, Any]) -> None:
    rules = "slot.backward member=w0-1 step=25 kill; slot.backward member=w1-1 step=25 kill"
    ended = launch(tmp_path / "run", OWN_LOOP, *STEPS, options=("--nproc-per-node", 2), **failing(rules))
    assert ended.returncode == 0, said(ended)
    assert finished(tmp_path / "run")["weights_sha256"] == alone["weights_sha256"]
    verdict = verify(tmp_path / "run")
    assert verdict.ok and verdict.lineage == 1, verdict
    started = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "worker_started"]
    assert len(started) == 4 and all(event["forked"] for event in started), "there is one blank, and soon another"


@pytest.mark.parametrize("place", ["slot.backward", pytest.param("apply.finished", marks=pytest.mark.soak)])
def test_torchrun_restarts_and_resumes(tmp_path: Path, alone: dict[str, Any], place: str) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    assert torchrun.exists()
    ended = execute(
        [
            *(torchrun, "--standalone", "--nproc-per-node", 2, "--max-restarts", 3, "--log-dir", tmp_path / "torchrun"),
            *(SCRIPTS / "once.py", f"{place} step=24 kill", 1, OWN_LOOP, *STEPS, "--run-dir", tmp_path),
        ],
        {},
    )
    assert ended.returncode == 0, said(ended)
    assert finished(tmp_path)["weights_sha256"] == alone["weights_sha256"], said(ended)
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.lineage == 1, verdict


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    steps = ("--steps", 200)
    job = Job(tmp_path / "run", *steps, script=OWN_LOOP, options=("--nproc-per-node", 2))
    try:
        job.until_step(20)
        job.send(signal.SIGINT)
        assert job.wait() == 130, job.output
        assert "Traceback" not in job.output and "accuracy" not in job.output
        saved = job.events("checkpoint_saved")[-1]["step"]
        assert saved == job.events("step_committed")[-1]["step"] + 1, "nothing is lost by an interrupt"
    finally:
        job.close()
    again = launch(tmp_path / "run", OWN_LOOP, *steps, options=("--nproc-per-node", 2))
    assert again.returncode == 0, said(again)
    alone = forked(OWN_LOOP, *steps, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    assert finished(tmp_path / "run")["weights_sha256"] == finished(tmp_path / "alone")["weights_sha256"]
