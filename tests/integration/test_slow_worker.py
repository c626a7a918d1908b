"""A worker that is slower than the others, with real processes: it is dealt fewer lanes, is named with the reason, and
makes room for a spare. No bit changes."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The final state of a worker that is alone."""
    ended = forked(SCRIPT, "--run-dir", tmp_path_factory.mktemp("healthy"))
    assert ended.returncode == 0, said(ended)
    return set(finals(ended.stdout))


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
    quick = ("--slot-s", 0.01, "health.lasting_steps=5", "health.lasting_s=0.2")
    how = ("--how", "computing,reading,processor", "--times", 4, "--steps", 60)
    ended = launch(tmp_path, SCRIPT, *how, *quick, options=("--nproc-per-node", 3))
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
