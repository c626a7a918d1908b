"""Real processes, real signals: whatever is killed, every step is committed once and the job finishes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_harness.runs.verify import verify
from integration.launch_tools import Job, run, workers
from integration.script_tools import SCRIPTS

pytestmark = pytest.mark.slow
Start = Callable[..., Job]


def test_an_undisturbed_run_finishes_and_cleans_up(start: Start) -> None:
    job = start("--steps", 8, options=workers(3))
    finished = job.finish()
    assert finished["version"] == 8
    assert len(job.events("generation")) == 1
    assert not job.events("failure_detected", "incident")
    assert len((job.run_dir / "ledger.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_worker_is_noticed_replaced_and_named(start: Start, rank: int) -> None:
    job = start("--steps", 60, "--step-s", 0.03, options=workers(3))
    job.until_step(5)
    killed_at = time.time()
    member = job.kill_rank(rank)
    job.until_event("generation", 2)
    job.finish()
    (failure,) = job.events("failure_detected")
    assert (failure["member"], failure["signal"], failure["rank"]) == (member, "SIGKILL", rank)
    assert failure["t_detected"] - killed_at < 0.25
    second = job.events("generation")[1]
    assert second["urgent"] and member not in second["members"]
    (incident,) = job.events("incident")
    assert member in incident["what"] and "SIGKILL" in incident["what"]
    assert any("unknown" in line or "out-of-memory" in line for line in incident["evidence"])
    assert any(e["world_size"] == 3 and e["generation"] > 2 for e in job.events("step_committed")), "not refilled"
    assert job.causes() == ["EH-W101"] == [failure["code"]] == [incident["code"]]


def test_a_spare_takes_the_place_and_is_replaced(start: Start) -> None:
    job = start("--steps", 80, "--step-s", 0.03, options=workers(2, "--spares", 1))
    job.until_step(5)
    job.until(lambda: any(e["spare"] for e in job.events("worker_started")), "a spare")
    job.until(lambda: "waiting for a generation" in run("status", job.run_dir).stdout, "a ready spare")
    member = job.kill_rank(1)
    generation = job.until_event("generation", 2)
    assert generation["world_size"] == 2 and member not in generation["members"]
    job.until(lambda: len([e for e in job.events("worker_started") if e["spare"]]) >= 2, "a new spare")
    job.finish()


def test_losses_with_progress_in_between_never_use_the_restarts_up(start: Start) -> None:
    job = start("--steps", 400, "--step-s", 0.01, options=workers(2, "--max-restarts", 1))
    job.until_step(1)
    for _ in range(3):
        job.until(lambda: len(job.members()) == 2 and job.status()["formed"], "both")
        job.until_step(job.status()["last_commit"].get("step", 0) + 15)
        victim = job.kill_rank(1)
        job.until(lambda v=victim: v not in job.members(), "the next generation")
    job.until(lambda: len(job.members()) == 2, "a third restart at that place")
    assert "given up" not in job.shown()
    job.finish()


def test_two_killed_at_once(start: Start) -> None:
    job = start("--steps", 60, "--step-s", 0.03, options=workers(4))
    job.until_step(4)
    killed = job.kill_ranks(0, 3)
    job.finish()
    assert {e["member"] for e in job.events("failure_detected")} == killed
    assert job.causes() == ["EH-W101", "EH-W101"]


def test_all_killed_restores_the_checkpoint_in_a_new_lineage(start: Start) -> None:
    job = start("--steps", 40, "--step-s", 0.03, "--save-every", 5, options=workers(2))
    job.until_step(12)
    job.kill_ranks(0, 1)
    job.finish()
    lineages = {e["lineage"] for e in job.events("step_committed")}
    assert lineages == {0, 1}
    first = min(e["step"] for e in job.events("step_committed") if e["lineage"] == 1)
    assert first % 5 == 0 and first >= 10
    assert job.causes() == ["EH-W101", "EH-W101"]


def test_a_stopped_process_is_replaced_within_its_deadline(start: Start) -> None:
    job = start("--steps", 80, "--step-s", 0.03, "--deadline-s", 0.4, options=workers(3))
    job.until_step(5)
    stopped_at = time.time()
    member = job.kill_rank(1, signal.SIGSTOP)
    failure = job.until_event("failure_detected")
    assert failure["member"] == member and "SIGSTOP" in failure["what"]
    assert failure["t_detected"] - stopped_at < 1.5
    job.finish()
    assert job.causes() == ["EH-H102"]


def test_a_hanging_worker_is_replaced(start: Start) -> None:
    job = start("--steps", 20, "--deadline-s", 0.4, "--hang-at", 6, options=workers(1))
    job.finish()
    (failure,) = job.events("failure_detected")
    assert "did not finish within 0.4 s" in failure["what"] and failure["detected_by"] == "progress deadline"
    assert job.causes() == ["EH-H103"]


def test_a_crash_in_native_code_is_named(start: Start) -> None:
    job = start("--steps", 20, "--segv-at", 5, options=workers(2))
    job.finish()
    assert job.events("failure_detected")[0]["signal"] == "SIGSEGV"
    assert "PYTHONFAULTHANDLER" in job.events("incident")[0]["advice"]
    assert job.causes() == ["EH-W103"]


def test_the_agents_death_takes_its_workers_and_is_repaired(start: Start) -> None:
    job = start("--steps", 50, "--step-s", 0.03, "--save-every", 4, options=workers(2))
    job.until_step(9)
    before = [job.pid(m) for m in job.members()]
    os.kill(job.record()["agent_pid"], signal.SIGKILL)
    job.until_event("run_started", 2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    finished = job.finish()
    assert finished["version"] == 50
    assert "the agent died by itself" in job.output
    assert job.events("run_started")[1]["lineage"] == 0
    assert job.events("step_committed")[-1]["lineage"] == 1
    assert job.causes() == ["EH-W111"]


def test_no_checkpoint_is_ahead_of_what_the_agent_wrote_down(start: Start) -> None:
    """The agent stands still while the workers go on over many checkpoints, and is killed: none of them is restored."""
    options = workers(2)
    job = start("--how", "never", "--steps", 80, "--step-s", 0.05, script=SCRIPTS / "stopping.py", options=options)
    job.until_step(7)
    agent = job.record()["agent_pid"]
    os.kill(agent, signal.SIGSTOP)
    time.sleep(2.5)  # in which the workers do some thirty steps, and a checkpoint every five
    os.kill(agent, signal.SIGKILL)
    job.finish()
    assert verify(job.run_dir).ok, str(verify(job.run_dir))
    told, again = ([e["step"] for e in job.events("step_committed") if e["lineage"] == lineage] for lineage in (0, 1))
    assert again == list(range(again[0], 80)) and again[0] % 5 == 0 and again[0] <= told[-1] + 1


def test_scaling_up_and_down_restarts_nobody(start: Start) -> None:
    job = start("--steps", 400, "--step-s", 0.02, options=workers(2))
    job.until_step(3)
    assert json.loads(run("scale", job.run_dir, "--workers", 4, "--json").stdout)["target"] == 4
    job.until(lambda: job.events("step_committed")[-1]["world_size"] == 4, "4 workers")
    refused = run("scale", job.run_dir, "--workers", 99)
    assert refused.returncode == 2 and "allows 1 to 8" in refused.stderr
    assert run("scale", job.run_dir, "--workers", 1).returncode == 0
    job.until(lambda: job.events("step_committed")[-1]["world_size"] == 1, "1 worker")
    assert json.loads(run("stop", job.run_dir, "--json").stdout) == {"stopped": str(job.run_dir), "exit_code": 143}
    assert job.wait() == 143
    assert not job.events("failure_detected", "incident")
    assert all(not e["urgent"] for e in job.events("generation")[1:4])
    stopped = job.events("worker_stopped")
    assert len(stopped) == 4 and all(e["expected"] for e in stopped)
    assert job.causes() == ["EH-P105"]


def test_below_the_minimum_the_job_waits_alive(start: Start) -> None:
    job = start("--steps", 60, "--step-s", 0.03, options=workers(2, "--min-workers", 2))
    job.until_step(5)
    survivor = job.members()[0]
    job.kill_rank(1)
    job.until(lambda: any("1 of at least 2" in e["reason"] for e in job.events("waiting")), "waiting")
    job.finish()
    assert job.events("generation")[-1]["members"][0] == survivor
    assert {event.get("code") for event in job.events("waiting")} == {None, "EH-L105"}, "none at the start"
    assert job.causes() == ["EH-W101"]


@pytest.mark.soak  # nobody is given up within the first half minute
def test_a_worker_that_never_says_hello_is_replaced(start: Start) -> None:
    job = start("--steps", 1200, "--step-s", 0.03, "--mute-at-first", 1, options=workers(2, "--join-timeout", 0))
    job.until_step(5)
    failure = job.until_event("failure_detected")
    assert (failure["member"], "has not called elastic_harness.start()" in failure["what"]) == ("w1-1", True), failure
    job.until(lambda: job.members() == ["w0-1", "w1-2"], "the replacement to join")
    job.finish()
    assert job.causes() == ["EH-H106"]


def test_too_few_workers_without_restarts(start: Start) -> None:
    job = start("--steps", 500, options=workers(2, "--min-workers", 2, "--max-restarts", 0))
    job.until_step(3)
    job.kill_rank(1)
    assert job.wait() == 3
    assert "1 of at least 2 workers are left" in job.output
    assert job.causes() == ["EH-W101 → EH-L106"]
