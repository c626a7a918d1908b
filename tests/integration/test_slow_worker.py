"""A worker that is slower than the others, with real processes: it is dealt fewer lanes, is named with the reason, and
makes room for a spare. No bit changes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.ledger import read_ledger
from elastic_harness.runs.verify import verify
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, said

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "uneven.py"
WORKERS, LANES, SLOW = 4, 16, "w1-1"
OPTIONS = ("--nproc-per-node", WORKERS)
LONGER = ("--steps", 30)
QUICKLY = ("health.lasting_steps=4", "health.lasting_s=0.1")


def undisturbed(folder: Path, *arguments: object) -> set[str]:
    """The final state of a worker that is alone."""
    ended = forked(SCRIPT, "--run-dir", folder, *arguments)
    assert ended.returncode == 0, said(ended)
    return set(finals(ended.stdout))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return undisturbed(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def healthy_longer(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return undisturbed(tmp_path_factory.mktemp("longer"), *LONGER)


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["event"] == name]


def lanes_of(run_dir: Path, member: str) -> list[int]:
    """How many lanes a member computed in each step."""
    lines = read_ledger(run_dir).followed()
    return [sum(hi - lo for m, lo, hi in lines[step].computed_by if m == member) for step in sorted(lines)]


def test_a_slow_worker_is_dealt_fewer_lanes_and_no_bit_changes(tmp_path: Path, healthy: set[str]) -> None:
    ended = launch(tmp_path, SCRIPT, "--times", 3, options=OPTIONS)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    dealt = lanes_of(tmp_path, SLOW)
    assert dealt[3:5] == [4, 4] and all(1 <= count <= 2 for count in dealt[6:]), dealt
    assert verify(tmp_path).ok and not events(tmp_path, "failure_detected")


def test_without_dealing_by_speed_it_keeps_its_lanes(tmp_path: Path, healthy: set[str]) -> None:
    """The setting differs on one worker only: all must deal alike nevertheless."""
    ended = launch(tmp_path, SCRIPT, "--times", 3, "--unasked", options=OPTIONS)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    assert lanes_of(tmp_path, SLOW) == [4] * 12


def test_a_slow_worker_is_named_with_what_slows_it_down(tmp_path: Path) -> None:
    """One after the other: its slots wait, its samples come late, others have its processor."""
    how = ("--how", "computing,reading,processor", "--times", 4, "--steps", 46, "--slot-s", 0.01)
    ended = launch(tmp_path, SCRIPT, *how, *QUICKLY, options=("--nproc-per-node", 3))
    assert ended.returncode == 0 and len(set(finals(ended.stdout))) == 2, said(ended)
    named = [e for e in read_events(tmp_path / "events.jsonl") if e["event"].startswith("worker_")]
    named = [(e["event"], e["member"], e.get("cause")) for e in named if "step" in e]
    over = ("worker_fast_again", SLOW, None)
    slow = [("worker_slow", SLOW, cause) for cause in ("unknown", "data", "cpu")]
    assert named == [slow[0], over, slow[1], over, slow[2], over], said(ended)
    assert "it was ready to run, but had no processor" in ended.stdout, said(ended)
    assert verify(tmp_path).ok and not events(tmp_path, "failure_detected") and not events(tmp_path, "alarm")


@pytest.mark.parametrize("place", ["lane.finished", "exchange.headers_received"])
def test_another_worker_dies_while_lanes_are_dealt_by_speed(tmp_path: Path, healthy: set[str], place: str) -> None:
    """The survivors forget the paces of the generation before, as a newcomer knows none."""
    rules = failing(f"{place} member=w2-1 step=7 kill")
    ended = launch(tmp_path, SCRIPT, "--times", 4, options=OPTIONS, **rules)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    assert [e["member"] for e in events(tmp_path, "failure_detected")] == ["w2-1"], "nobody dies for being slow"
    assert lanes_of(tmp_path, SLOW)[6] <= 2 and verify(tmp_path).ok


def replaced(tmp_path: Path, **rules: str) -> subprocess.CompletedProcess[str]:
    """Three workers, one of them slow, and a spare."""
    slow = ("--times", 4, "--slot-s", 0.01, *LONGER, *QUICKLY, "health.on_slow=replace")
    options = ("--nproc-per-node", 3, "--spares", 1, "--max-workers", 3)
    return launch(tmp_path, SCRIPT, *slow, options=options, **rules)


def test_a_spare_takes_the_place_of_a_slow_worker(tmp_path: Path, healthy_longer: set[str]) -> None:
    ended = replaced(tmp_path)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy_longer, said(ended)
    generations = events(tmp_path, "generation")
    assert sorted(generations[-1]["members"]) == ["w0-1", "w2-1", "w3-1"], said(ended)
    assert "w1-1 makes room, as it is slow" in generations[-1]["reason"]
    assert not any(each["urgent"] for each in generations[1:]), "nobody aborts anything, so nothing is computed twice"
    assert verify(tmp_path).ok and not events(tmp_path, "failure_detected"), said(ended)
    assert lanes_of(tmp_path, SLOW)[-1] == 0 < lanes_of(tmp_path, SLOW)[3]
    assert [event["expected"] for event in events(tmp_path, "worker_stopped")].count(False) == 0


def test_a_slow_worker_comes_back_if_the_spare_dies(tmp_path: Path, healthy_longer: set[str]) -> None:
    ended = replaced(tmp_path, **failing("recovery.reported member=w3-1 kill"))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy_longer, said(ended)
    assert [event["member"] for event in events(tmp_path, "failure_detected")] == ["w3-1"], said(ended)
    members = [set(each["members"]) for each in events(tmp_path, "generation")]
    assert members == [{"w0-1", SLOW, "w2-1"}, {"w0-1", "w3-1", "w2-1"}, {"w0-1", SLOW, "w2-1"}], said(ended)
    assert verify(tmp_path).ok
