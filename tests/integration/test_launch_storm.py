"""A storm of everything at once: kills, stops, a dead agent, scaling. Whatever happens, the job must finish exactly."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from integration.launch_tools import Job, run


def storm(job: Job, seed: int, seconds: float) -> None:
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end and job.process.poll() is None:
        time.sleep(chance.expovariate(4.0))
        started = job.events("worker_started")
        stopped = {e["member"] for e in job.events("worker_stopped")}
        living = [e["pid"] for e in started if e["member"] not in stopped]
        with contextlib.suppress(ProcessLookupError):
            match chance.choices(["kill", "two", "stop", "agent", "scale"], [8, 3, 2, 0.5, 2])[0]:
                case "kill" if living:
                    os.kill(chance.choice(living), signal.SIGKILL)
                case "two":
                    for pid in chance.sample(living, min(2, len(living))):
                        os.kill(pid, signal.SIGKILL)
                case "stop" if living:
                    os.kill(chance.choice(living), signal.SIGSTOP)
                case "agent" if pid := job.record().get("agent_pid"):
                    os.kill(pid, signal.SIGKILL)
                case "scale":
                    run("scale", job.run_dir, "--workers", chance.randint(1, 4))


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [pytest.param(1, 5.0, marks=pytest.mark.slow)]
    + [pytest.param(seed, 30.0, marks=pytest.mark.soak) for seed in range(2, 8)],
)
def test_a_storm(tmp_path: Path, seed: int, seconds: float) -> None:
    print("seed", seed)
    options = ("--nproc-per-node", 3, "--spares", 1, "--quiet")
    script = ("--steps", int(seconds * 40), "--step-s", 0.02, "--deadline-s", 0.3, "--save-every", 10)
    job = Job(tmp_path / "run", *script, options=options)
    try:
        job.until_step(3)
        storm(job, seed, seconds)
        job.finish()
        assert job.events("failure_detected")
    finally:
        job.close()
