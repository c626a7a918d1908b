"""What the agent makes of what it measures: the clock, its own writes, the time of steps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_harness.agent.reporting import alarms, records
from elastic_harness.agent.reporting.alarms import Alarms
from elastic_harness.agent.reporting.records import Records
from elastic_harness.contract.board import Board, BoardReader, Pace
from elastic_harness.contract.messages import Commit, SlowWorker
from elastic_harness.runs.events import EVENTS, read_events
from elastic_harness.runs.folder import RunFolder


class Watched:
    """Alarms with real records, and a clock of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.set_s = 0.0, 0.0
        self.shown: list[str] = []
        monkeypatch.setattr(alarms, "read_pools", lambda now: [])
        clock = SimpleNamespace(
            time=lambda: 1e9 + self.now_s + self.set_s,
            monotonic=lambda: self.now_s,
            clock_gettime=lambda which: self.now_s,
            CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        )
        monkeypatch.setattr(alarms, "time", clock)
        self.records = Records(RunFolder(folder))
        self.alarms = Alarms(self.records, SimpleNamespace(notice=self.shown.append))  # type: ignore[arg-type]

    def look(self, looks: int = 1) -> None:
        for _ in range(looks):
            self.now_s += alarms.LOOK_S
            self.alarms.look([])

    def told(self) -> list[dict[str, Any]]:
        found = [e for e in read_events(self.records.folder.path / EVENTS) if e["event"] == "alarm"]
        assert [f"alarm: {each['message']}" for each in found] == self.shown
        return found


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_clock_that_was_set_back_is_told(watched: Watched) -> None:
    watched.look(5)
    watched.set_s = -30.0
    watched.look(5)
    told, = watched.told()
    assert (told["kind"], told["severity"], told["evidence"]) == ("clock", "warning", {"step_s": -30.0})
    assert "set back by 30.0 s" in told["message"]


def test_a_disk_that_holds_the_agent_up_is_told(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however often it does so again, until it was quick for a minute."""
    watched.look(3)
    with monkeypatch.context() as patched:
        passing = iter((10.0, 11.5))
        patched.setattr(records, "time", SimpleNamespace(monotonic=lambda: next(passing)))
        watched.records.event("something")
    watched.look()
    for _ in range(3):
        watched.look(alarms.QUIET_LOOKS - 1)
        watched.records.slowest_write_s = 2.0
        watched.look()
    told, = watched.told()
    assert told["kind"] == "disk" and told["evidence"]["took_s"] == 1.5 and "checkpoint.nvme_path" in told["message"]
    watched.look(alarms.QUIET_LOOKS)
    watched.records.slowest_write_s = 2.0
    watched.look()
    assert [each["kind"] for each in watched.told()] == ["disk", "disk"]


def test_a_step_with_more_slots_is_not_called_slow(watched: Watched) -> None:
    """A schedule of batches doubles it. A real slowdown after that is told."""

    def committed(step_s: float, slots: int, count: int) -> None:
        for _ in range(count):
            watched.now_s += step_s
            watched.alarms.committed(Commit(0, 1, 1, 3, step_s=step_s, ledger={"slots": slots}), [])

    committed(1.0, 8, 150)
    committed(2.0, 16, 300)
    assert not watched.told()
    committed(8.0, 16, 100)
    told, = watched.told()
    assert (told["evidence"]["step_s"], told["evidence"]["best_step_s"]) == (8.0, 2.0)


def test_slow_steps_are_told_with_what_workers_show(watched: Watched) -> None:
    def committed(step_s: float | None, count: int) -> None:
        for _ in range(count):
            watched.now_s += step_s or 0.0
            watched.alarms.committed(Commit(0, 1, 1, 3, step_s=step_s), workers)

    slow = SlowWorker(7, 2.0, 2, 20, "cpu", "it had no processor", {})
    pages = [BoardReader(f"w{place}") for place in range(3)]
    for reading, page in zip((0.05, 0.4, 0.0), pages[:2], strict=False):
        Board(page.descriptor).show_pace(Pace(9, 1.0, 0.1, reading, 0.25, 0.0))
    workers: Any = [
        SimpleNamespace(member=f"w{place}-1", running=True, slow=slow if place == 0 else None, board=page)
        for place, page in enumerate(pages)
    ]
    committed(1.0, 200)
    committed(None, 20)
    committed(2.0, 100)
    told, = watched.told()
    assert told["evidence"] == {
        "step_s": 2.0, "best_step_s": 1.0, "members": 3, "slow": {"w0-1": "it had no processor"},
        "reading": {"w0-1": 0.05, "w1-1": 0.4}, "queued": {"w0-1": 0.25, "w1-1": 0.25},
    }  # fmt: skip
    assert told["message"] == (
        "steps take 2 s, 2.0 times as long as in the best hour with 3 workers (1 s): w0-1 is slow (it had no "
        "processor); waits for samples in the last step: w1-1 40%; waits for a processor in the last step: w0-1 25%, "
        "w1-1 25%"
    )
    workers.clear()
    committed(1.0, 200)
    committed(2.0, 100)
    assert watched.told()[-1]["message"].endswith("nothing that workers of this node measure shows why")
    for page in pages:
        page.close()
