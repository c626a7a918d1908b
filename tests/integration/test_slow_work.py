"""Work that takes far longer than what came before is finished; what never ends, or kills, is told from chance."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import Job, causes, workers
from integration.script_tools import SCRIPTS, forked, launch, said

pytestmark = pytest.mark.slow
SLOW = SCRIPTS / "slow.py"
Start = Callable[..., Job]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir / "events.jsonl") if e["event"] == name]


@pytest.mark.parametrize("kind", ["work", "compile"])
def test_slow_work_is_finished_with_the_weights_of_an_undisturbed_run(tmp_path: Path, kind: str) -> None:
    alone = forked(SLOW, kind, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    ended = launch(tmp_path / "run", SLOW, kind, "--seconds", 2, options=workers(3))
    assert ended.returncode == 0, said(ended)
    (one,), (other,) = events(tmp_path / "run", "run_finished"), events(tmp_path / "alone", "run_finished")
    assert one["weights_sha256"] == other["weights_sha256"]
    assert verify(tmp_path / "run").ok
    failures = events(tmp_path / "run", "failure_detected")
    assert all("computing slot" in e["what"] and "did not finish within" in e["what"] for e in failures), failures
    assert len(failures) == 1, "the second try had the time it needed; slow reading and evaluation harm nobody"


def test_a_slot_that_never_ends_stops_the_job_and_the_deadline_is_named(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", SLOW, "forward", "--seconds", 600, "--longest-s", 1, options=workers(3))
    assert ended.returncode == 1, said(ended)
    message = events(tmp_path / "run", "run_finished")[0]["message"]
    # 10 s is what one in its first step has
    assert causes(tmp_path / "run") == ["EH-H103 → EH-U103"]
    assert re.search(r"did not finish within (1 s|10 s), as long as elastic\.progress_timeout_max_s", message), message


def test_kills_that_happen_to_strike_in_the_same_slot_do_not_stop_the_job(start: Start) -> None:
    job = start("--steps", 8, "--step-s", 0.6, options=workers(5))
    job.until_step(1)
    struck: list[str] = []

    def first_computes() -> str | None:
        rows = job.status()["workers"]
        where = [row["state"] for row in rows if row["rank"] == 0 and not row["leaving"]]
        return where[0] if where and where[0].startswith("computing slot 0, step") else None

    while len(struck) < 4:
        struck.append(job.until(first_computes, "the first member to compute"))
        victim = job.kill_rank(0, signal.SIGKILL)
        job.until(lambda v=victim: v not in job.members(), "the next generation")
    assert max(Counter(struck).values()) >= 3, f"three of them must strike in one slot: {struck}"
    job.finish()
