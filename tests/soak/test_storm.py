"""A random storm of kills, stops and changes of size against the built-in trainer, for SOAK_MINUTES (default 2). The
seed is printed; SOAK_SEED repeats the choices (not their timing)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from elastic_harness import failpoints
from integration.harness import FOREVER, TrainingJob

pytestmark = pytest.mark.soak
STEPS = 60
STOPPABLE = [p for p in failpoints.PLACES if p.startswith(("slot.", "lane.", "exchange.", "apply.", "recovery."))]


@pytest.mark.parametrize("spares", [0, 1])
def test_storm(
    train: Callable[..., TrainingJob],
    undisturbed: Callable[[int], str],
    spares: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = int(os.environ.get("SOAK_SEED") or time.time_ns() % 2**31)
    rng = random.Random(seed + spares)
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES") or 2) / 2
    rounds = 0
    with capsys.disabled():
        print(f"\nstorm: SOAK_SEED={seed}, spares={spares}")
    while time.monotonic() < end:
        storm(train(rng.randint(2, 4), "--spares", spares, steps=STEPS, settings=SETTINGS), rng, undisturbed(STEPS))
        rounds += 1
    assert rounds


SETTINGS = [
    "elastic.progress_timeout_min_s=3",
    "elastic.first_step_timeout_s=20",
    "checkpoint.checkpoint_interval=5",
]


def storm(job: TrainingJob, rng: random.Random, expected: str) -> None:
    """One job from start to end. Faults are planned for whoever passes a place, so some of them never happen; the
    weights, the ledger and the leak checks hold whatever happened."""
    victims: set[str] = set()
    job.fill()
    while job.limit < STEPS - 8:
        for _ in range(rng.randint(1, 2)):
            choice = rng.random()
            if choice < 0.5:
                action = rng.choice(["kill", "kill", "kill", "stop"])
                job.order(rng.randrange(4), rng.choice(STOPPABLE), action, hit=rng.randint(1, 3))
            elif choice < 0.8:
                members = [m for m in job.members() if m not in job.failed() and m not in victims]
                if members:
                    member = rng.choice(members)
                    number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
                    try:
                        os.kill(job.pid(member), number)
                        victims.add(member)
                    except ProcessLookupError:
                        pass
            else:
                job.scale(rng.randint(1, 4))
        steps = rng.randint(1, 6)
        job.allow(min(STEPS - 1, job.limit + steps))
        job.until(
            lambda: job.committed() >= job.limit - 1 or job.process.poll() is not None, "the storm to be weathered"
        )
    job.allow(FOREVER)
    assert job.wait() == 0, job.output
    assert job.events("run_finished")[-1]["weights_sha256"] == expected
    victims |= {str(job.victim(f)) for f in job.faults}
    assert set(job.failed()) <= victims, f"failed without a fault: {set(job.failed()) - victims}\n{job.output}"
    job.check_records()
    job.check_lanes()
    job.check_leaks()
