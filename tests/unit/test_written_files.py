"""Files that are written survive the death of their writer at any system call, a full disk, and damage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness import durable_file
from elastic_harness.agent.reporting.records import Records
from elastic_harness.commands import manage
from elastic_harness.errors import InfrastructureError
from elastic_harness.runs import json_lines, ledger
from elastic_harness.runs.events import EventLog, newest_events, read_events
from elastic_harness.runs.folder import RunFolder
from elastic_harness.runs.ledger import (
    LedgerLine,
    LedgerWriter,
    Reached,
    reached,
    read_ledger,
)
from unit.killed_writers import commit
from unit.test_ledger import ledger_line

WRITERS = Path(__file__).with_name("killed_writers.py")


@pytest.mark.parametrize(("writer", "calls"), [("events", 8), ("ledger", 14), ("records", 40), ("run.json", 15)])
def test_a_writer_killed_at_any_call_or_refused_at_any_size_leaves_old_or_new(
    tmp_path: Path, writer: str, calls: int
) -> None:
    done = subprocess.run(
        [sys.executable, WRITERS, writer, tmp_path / "run"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["killed"] >= calls and told["refused"] >= 2, told


@contextlib.contextmanager
def no_file_grows_past(nbytes: int) -> Iterator[None]:
    """The kernel takes the first part of a write and refuses the rest, as a disk does that fills up."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


@pytest.mark.parametrize("room", [0, 1, 7, 30])
def test_a_log_goes_on_when_there_is_room_again(tmp_path: Path, room: int) -> None:
    log, damaged = EventLog(tmp_path / "events.jsonl"), list[str]()
    log.emit("first")
    with no_file_grows_past((tmp_path / "events.jsonl").stat().st_size + room), pytest.raises(
        InfrastructureError, match=r"cannot write .*events.jsonl: File too large; free space .* to resume"
    ):
        log.emit("refused")
    log.emit("last")
    log.close()
    assert [e["event"] for e in read_events(tmp_path / "events.jsonl", damaged.append)] == ["first", "last"]
    assert not damaged


def test_threads_that_write_to_a_full_disk_lose_nothing_of_each_other(tmp_path: Path) -> None:
    for attempt in range(20):
        log, damaged = EventLog(tmp_path / f"{attempt}.jsonl"), list[str]()

        def write(thread: int, log: EventLog = log) -> list[tuple[int, int]]:
            kept = []
            for number in range(60):
                with contextlib.suppress(InfrastructureError):
                    log.emit("kept", thread=thread, number=number, more="x" * (number % 13 * 40))
                    kept.append((thread, number))
            return kept

        with no_file_grows_past(20_000), ThreadPoolExecutor(4) as pool:
            kept = [key for keys in pool.map(write, range(4)) for key in keys]
        log.close()
        found = [(e["thread"], e["number"]) for e in read_events(tmp_path / f"{attempt}.jsonl", damaged.append)]
        assert sorted(found) == sorted(kept) and not damaged and 20 < len(kept) < 240


def test_a_part_that_cannot_be_taken_back_ends_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next line would be lost with it."""
    log, damaged = EventLog(tmp_path / "events.jsonl"), list[str]()

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with no_file_grows_past(5), monkeypatch.context() as failing, pytest.raises(InfrastructureError):
        failing.setattr(os, "ftruncate", refuse)
        log.emit("refused")
    with pytest.raises(InfrastructureError):
        log.emit("refused too")
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("last")
    log.close()
    assert [e["event"] for e in read_events(tmp_path / "events.jsonl", damaged.append)] == ["last"]
    assert not damaged


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    durable_file.write(file, b"old")
    with no_file_grows_past(2), pytest.raises(InfrastructureError, match="cannot write"):
        durable_file.write(file, b"newer")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
    (tmp_path / ".settings.12-34.tmp").write_bytes(b"of a writer that was killed")
    durable_file.remove_leftovers(file)
    assert list(tmp_path.iterdir()) == [file]


# ---- reading past damage


DAMAGE = ["no JSON", '{"event": "torn"{"event": "glued"}', "[1]", '{"no": "event"}', "\0" * 70, "\udcff", ""]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_line_costs_nothing_but_itself(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither `ls` nor a resume depends on the log; both tell of the damage."""
    run = tmp_path / "run"
    run.mkdir()
    RunFolder(run).update(run_id="a", created=1.0)
    records = Records(RunFolder(run))
    records.commit(commit(0))
    records.close()
    with open(run / "events.jsonl", "ab") as file:
        file.write(damage.encode(errors="surrogateescape") + b"\n")
    records = Records(RunFolder(run))
    assert records.committed == 0 and len(records.damaged) == 1 and "events.jsonl at byte" in records.damaged[0]
    records.commit(commit(1))
    records.close()
    damaged: list[str] = []
    events = list(read_events(run / "events.jsonl", damaged.append))
    assert [e["event"] for e in events] == ["step_committed", "damaged_lines", "step_committed"] and len(damaged) == 1
    assert list(newest_events(run / "events.jsonl")) == events[::-1]
    assert manage.ls([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert manage.status([str(run)]) == 0
    assert "1 damaged line" in capsys.readouterr().out


def test_a_run_whose_record_is_damaged_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        RunFolder(tmp_path / name).update(run_id=name, created=1.0)
    (tmp_path / "bad" / "run.json").write_text("{")
    assert manage.ls([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "good" in told and "bad " in told and "damaged" in told


@given(st.lists(st.integers(0, 40_000), max_size=12), st.binary(max_size=20).filter(lambda tail: b"\n" not in tail))
def test_reading_backwards_is_reading_forwards_turned_round(sizes: list[int], tail: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        texts = ["x" * size + "\n" if size % 7 == 0 else json.dumps({"text": "x" * size}) + "\n" for size in sizes]
        path.write_bytes("".join(texts).encode() + tail)
        forwards = list(json_lines.read(path))
        assert list(json_lines.read_backwards(path)) == forwards[::-1]
        assert [line.end - line.begin for line in forwards] == list(map(len, texts))
        assert json_lines.torn(path) == bool(tail)


# ---- how far a ledger goes


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=30), st.integers(0, 30))
def test_how_far_a_ledger_goes_is_what_a_set_of_its_steps_says(keys: list[tuple[int, int]], cut: int) -> None:
    """In any order, and if what is known of the first lines comes after the others."""
    known, earlier = Reached(), Reached()
    lines = [LedgerLine.from_json(ledger_line(step, lineage, from_step=lineage)) for lineage, step in keys]
    for number, line in enumerate(lines):
        (earlier if number < cut else known).include(line)
    if cut and lines:
        known.include_all(json.loads(json.dumps(earlier.to_json())))
    assert len(known) == len(set(keys))
    assert all(((lineage, step) in known) == ((lineage, step) in keys) for lineage in range(4) for step in range(14))
    assert known.lineage == known.from_step == max((lineage for lineage, _ in keys), default=0)
    assert known.committed == max((s for lineage, s in keys if lineage == known.lineage), default=-1)


@pytest.mark.slow
def test_going_on_with_a_long_ledger_reads_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    monkeypatch.setattr(ledger, "REACHED_EVERY_BYTES", 1 << 18)
    with LedgerWriter(path) as writer:
        assert all(writer.append(ledger_line(step)) for step in range(5000))
    assert path.stat().st_size > 1 << 20
    found, damaged, nbytes = reached(path)
    assert (len(found), found.committed, found.last["step"]) == (5000, 4999, 4999) and not damaged
    assert nbytes < 1.1 * (1 << 18)
    with LedgerWriter(path) as writer:
        assert not any(writer.append(ledger_line(step)) for step in range(0, 5000, 97))
        assert writer.append(ledger_line(5000))
    assert [entry.step for entry in read_ledger(path).entries] == list(range(5001))


def test_a_ledger_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    """Plain lists, and nowhere how far it reaches."""
    path = tmp_path / "ledger.jsonl"
    old = [ledger_line(step) for step in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    with LedgerWriter(path) as writer:
        assert not writer.append(old[2]) and writer.append(ledger_line(4))
    assert [line.to_json() for line in read_ledger(path).lines] == [
        LedgerLine.from_json(ledger_line(step)).to_json() for step in range(5)
    ]


def test_lines_of_an_unknown_kind_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(ledger_line(0)) + '\n{"kind": "of a later version", "step": []}\n')
    with LedgerWriter(path) as writer:
        assert not writer.damaged and writer.append(ledger_line(1))
    found = read_ledger(path)
    assert not found.damaged and [entry.step for entry in found.entries] == [0, 1]
