"""What the agent writes down survives its own death at any point."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from elastic_harness.agent.elastic_run import ElasticRun
from elastic_harness.agent.options import LaunchOptions
from elastic_harness.agent.reporting import alarms
from elastic_harness.agent.reporting.records import Records
from elastic_harness.contract.messages import Commit, LogEvent
from elastic_harness.contract.wire import Malformed
from elastic_harness.health.memory import MemoryReading
from elastic_harness.membership import protocol
from elastic_harness.runs.events import read_events
from elastic_harness.runs.folder import RunFolder


def commit(step: int, lineage: int = 0, generation: int = 4, **ledger: Any) -> Commit:
    line = {
        "epoch": 0, "position": step, "count": 1, "slots": 1, "lanes": 1, "computed_by": [["w0-1", 0, 1]],
        "slot_samples": ["00" * 8], "slot_weight": [1.0], **ledger,
    }  # fmt: skip
    return Commit(lineage, step, generation, 1, loss=0.5, tokens=8, lr=0.1, step_s=0.2, ledger=line)


def opened(path: Path) -> Records:
    return Records(RunFolder(path))


def events(path: Path) -> list[dict[str, Any]]:
    return list(read_events(path / "events.jsonl"))


def test_an_alarm_about_memory_names_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, notices, records = 1 << 30, list[str](), opened(tmp_path)
    for index, used in enumerate([*range(20, 60), *[98] * 5]):  # grows by a hundredth each time, and jumps
        reading = MemoryReading(5.0 * index, "the memory of cgroup /job", used * gib, 100 * gib)
        monkeypatch.setattr(alarms, "read_pools", lambda now_s, reading=reading: [reading])
        if not index:
            watching = alarms.Alarms(records, SimpleNamespace(notice=notices.append))  # type: ignore[arg-type]
        watching.look([SimpleNamespace(member="w0-1", pid=os.getpid(), running=True)])  # type: ignore[list-item]
    records.close()
    soon, full = events(tmp_path)
    assert (soon["event"], soon["kind"], soon["severity"]) == ("alarm", "memory", "warning")
    assert soon["evidence"]["full_in_s"] == 320.0 and "full in 320 s" in soon["message"]
    assert soon["evidence"]["workers_bytes"]["w0-1"] > 1 << 20
    assert full["severity"] == "critical" and full["evidence"]["used_bytes"] == 98 * gib
    assert notices == [f"alarm: {soon['message']}", f"alarm: {full['message']}"]


def test_a_commit_is_written_once_whoever_repeats_it(tmp_path: Path) -> None:
    records = opened(tmp_path)
    assert not records.born
    assert records.commit(commit(0)) and not records.commit(commit(0, generation=5)) and records.commit(commit(1))
    records.close()
    assert [e["step"] for e in events(tmp_path)] == [0, 1]
    again = opened(tmp_path)
    assert not again.commit(commit(1)) and again.commit(commit(1, lineage=1))
    again.close()
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3


def test_who_is_rolled_back_is_heard_first(tmp_path: Path) -> None:
    """A snapshot counts only if the steps before it are in the ledger, so a rollback needs what was told of them."""
    (tmp_path / "run").mkdir()
    records, ends = opened(tmp_path / "run"), list[int]()
    worker = SimpleNamespace(member="w0-1", running=True, release=lambda *_: None, signal=ends.append)
    options = LaunchOptions(1, 1, 1, 0, None, 60.0, 5.0, quiet=True, command=("true",))
    known = {"folder": records.folder, "options": options, "records": records, "workers": {"w0-1": worker}}
    agent: Any = MagicMock(**known, outcome=None)
    run = ElasticRun(agent)
    unread = [commit(step) for step in range(3)]

    def hear(which: Any) -> None:
        while unread:
            run.on_message(which, unread.pop(0))

    agent.hear = hear
    run._carry_out(protocol.RollBack(("w0-1",), 1, 2, "planted"))
    records.close()
    assert ends == [9] and records.committed == 2 and (records.lineage, records.from_step) == (1, 2)
    told = [(e["event"], e.get("step"), e["lineage"]) for e in events(tmp_path / "run") if e["event"] != "waiting"]
    assert told == [*(("step_committed", step, 0) for step in range(3)), ("rollback", None, 1)]


@pytest.mark.parametrize("first", ["w0-1", "w1-1"])
def test_what_makes_a_run_go_back_is_told_once_whoever_is_heard_first(tmp_path: Path, first: str) -> None:
    """The first one that is heard may have the others ended, so each of them says it."""
    records = opened(tmp_path)
    options = LaunchOptions(2, 2, 2, 0, None, 60.0, 5.0, quiet=True, command=("true",))
    run = ElasticRun(MagicMock(folder=records.folder, options=options, records=records, workers={}))
    for generation in (1, 4):  # the lineage that begins then may come to the same again
        for member in sorted(("w0-1", "w1-1"), key=lambda member: member != first):
            said = LogEvent("rollback_decided", {"step": 5, "generation": generation, "reason": f"heard of {member}"})
            run.on_message(SimpleNamespace(member=member), said)  # type: ignore[arg-type]
    records.close()
    told = [(event["event"], event["generation"], event["reason"]) for event in events(tmp_path)]
    assert told == [("rollback_decided", generation, f"heard of {first}") for generation in (1, 4)]


def test_what_a_relaunch_has_to_know(tmp_path: Path) -> None:
    records = opened(tmp_path)
    records.remember(lineage=2, from_step=7)
    records.use_number(9)
    records.commit(commit(7, lineage=2))
    records.close()
    again = opened(tmp_path)
    assert (again.number, again.lineage, again.from_step, again.born, again.committed) == (9, 2, 7, True, 7)
    again.close()


def test_the_ledger_alone_is_enough(tmp_path: Path) -> None:
    records = opened(tmp_path)
    records.remember(lineage=1, from_step=3)
    records.commit(commit(3, lineage=1, generation=12))
    records.close()
    for name in ("run.json", "generation"):
        (tmp_path / name).unlink()
    again = opened(tmp_path)
    assert (again.number, again.lineage, again.from_step, again.born) == (12, 1, 3, True)
    again.close()


def test_an_event_lost_between_ledger_and_log_is_written_again(tmp_path: Path) -> None:
    records = opened(tmp_path)
    for step in range(3):
        records.commit(commit(step))
    records.close()
    log = tmp_path / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    opened(tmp_path).close()
    opened(tmp_path).close()
    assert [e["step"] for e in events(tmp_path)] == [0, 1, 2]
    assert events(tmp_path)[-1]["reason"]


def test_a_commit_that_is_no_ledger_line_is_refused(tmp_path: Path) -> None:
    records = opened(tmp_path)
    broken = commit(0)
    assert broken.ledger is not None
    del broken.ledger["slots"]
    with pytest.raises(Malformed, match="slots"):
        records.commit(broken)
    records.close()
    assert events(tmp_path) == []
    assert json.loads((tmp_path / "run.json").read_text() if (tmp_path / "run.json").exists() else "{}") == {}
