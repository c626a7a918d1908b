"""Trackers: each step once, however often the process that follows a run is killed and begun again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_harness import cli, file_lock
from elastic_harness.runs import folder as folders
from elastic_harness.tracking import trackers
from elastic_harness.tracking.follow import follow
from elastic_harness.tracking.trackers import TrackedRun
from unit.test_episodes import Log


class Book:
    """A tracker that writes figures down in memory, and forgets what was not flushed."""

    kept: dict[int, list[float]]  # step → its losses, as often as they were logged
    forgets = True
    late_s = 0.0

    def __init__(self, run: TrackedRun) -> None:
        self.pending: list[tuple[int, float]] = []
        if self.forgets:
            self.go_back(run.resumes_at)

    def log(self, step: int, t: float, figures: Mapping[str, float]) -> None:
        self.pending.append((step, figures["loss"]))

    def go_back(self, step: int) -> bool:
        if not self.forgets:
            return False
        self.flush()
        for each in [each for each in self.kept if each >= step]:
            del self.kept[each]
        return True

    def flush(self) -> None:
        for step, loss in self.pending:
            self.kept.setdefault(step, []).append(loss)
        self.pending = []

    def newest(self) -> int | None:
        return None if self.forgets else max(self.kept, default=-1)

    def close(self) -> None: ...


@pytest.fixture(params=[True, False], ids=["forgets", "knows"])
def book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Book]:
    made: type[Book] = type("Made", (Book,), {"kept": {}, "forgets": request.param})
    monkeypatch.setattr(trackers, "TRACKERS", {"book": made})
    return made


def restored() -> Log:
    """30 steps, then back to 20 and on to 40 with other losses."""
    log = Log(30)
    log.step = 20
    return log.commit(20, lineage=1, loss=2.0)


def follow_once(folder: Path) -> None:
    follow(folder, "run", ["book"], lambda: False, threading.Event())


def test_each_step_is_logged_once_wherever_it_is_begun_again(book: type[Book], tmp_path: Path) -> None:
    events = restored().events
    for end in (*range(0, len(events), 3), len(events)):
        log = Log()
        log.events = events[:end]
        follow_once(log.write(tmp_path / "run"))
        steps = {event["step"] for event in log.events if event["event"] == "step_committed"}
        lineages = {event["lineage"] for event in log.events if event["event"] == "step_committed"}
        newest = [event["step"] for event in log.events if event["event"] == "step_committed"][-1:]
        if book.forgets and 1 in lineages:
            steps = set(range(newest[0] + 1))
        assert sorted(book.kept) == sorted(steps), end
        assert all(len(losses) == 1 for losses in book.kept.values()), end
    assert [book.kept[step][0] for step in (19, 25, 39)] == [1.0, 2.0 if book.forgets else 1.0, 2.0]


def test_what_was_logged_before_a_kill_and_not_marked_is_not_logged_twice(book: type[Book], tmp_path: Path) -> None:
    folder = Log(30).write(tmp_path / "run")
    follow_once(folder)
    mark = folder / "tracking" / "book.json"
    for damaged in (json.dumps({"lineage": 0, "step": 12}), "half a li", ""):
        mark.write_text(damaged)
        follow_once(folder)
        assert {step: len(losses) for step, losses in book.kept.items()} == dict.fromkeys(range(30), 1), damaged


def curve(folder: Path) -> list[tuple[int, float]]:
    shown = EventAccumulator(str(folder / "tracking" / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars("loss")]


def test_tensorboard_shows_one_curve_however_often_its_writer_is_killed(tmp_path: Path) -> None:
    """The log grows, the follower is killed with SIGKILL at some moment and started again."""
    log, folder = restored(), tmp_path / "run"
    folder.mkdir()
    held = file_lock.take(folder / folders.LOCK, "busy", wait_s=0.0)
    command = [sys.executable, "-m", "elastic_harness", "track", str(folder), "tensorboard"]
    with open(folder / "events.jsonl", "w", buffering=1) as file:
        for begin, end in ((0, 20), (20, 40)):
            follower = subprocess.Popen(command)
            for event in log.events[begin:end]:
                file.write(json.dumps(event) + "\n")
            path = folder / "tracking" / "tensorboard.json"
            limit, marked = time.monotonic() + 60, b""
            while path.exists() is False or (marked := path.read_bytes()) == b"":
                assert time.monotonic() < limit and follower.poll() is None
                time.sleep(0.01)
            follower.send_signal(signal.SIGKILL if begin else signal.SIGTERM)
            assert follower.wait(60) == (-signal.SIGKILL if begin else 0), marked
        for event in log.events[40:]:
            file.write(json.dumps(event) + "\n")
    os.close(held)
    assert cli.main(["track", str(folder), "tensorboard"]) == 0
    assert curve(folder) == [(step, 1.0 if step < 20 else 2.0) for step in range(40)]


def test_a_loss_that_is_no_number_is_shown_as_that(tmp_path: Path) -> None:
    folder = Log(2).commit(loss=None).write(tmp_path / "run")
    assert cli.main(["track", str(folder), "tensorboard"]) == 0
    assert math.isnan(curve(folder)[2][1])


def test_what_cannot_be_tracked_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Log(2).write(tmp_path / "run")
    assert cli.main(["track", str(folder), "tensorbored"]) == 2
    assert "there are tensorboard, wandb" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert cli.main(["track", str(folder), "wandb"]) == 2
    assert "pip install 'elastic-harness[wandb]'" in capsys.readouterr().err


def of_wandb(folder: Path) -> Iterator[int]:
    """The steps in its files for offline runs, which are logs as LevelDB writes them."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        content, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            _, length, kind = struct.unpack_from("<IHB", content, at)
            if 32768 - at % 32768 < 7 or kind == 0:
                at += 32768 - at % 32768
                continue
            record += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                told = wandb_internal_pb2.Record.FromString(record)
                record = b""
                if told.WhichOneof("record_type") == "history":
                    yield told.history.step.num


def of_trackio(folder: Path) -> Iterator[int]:
    (path,) = folder.glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        yield from (step for (step,) in database.execute("select step from metrics"))


def of_mlflow(folder: Path) -> Iterator[int]:
    for path in folder.glob("*/*/metrics/loss"):
        yield from (int(line.split()[2]) for line in path.read_text().splitlines())


READERS = {"wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("default")
def test_other_trackers_take_each_step_once(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    folder = restored().write(tmp_path / "run")
    for _ in range(2):  # each in a process of its own: they leave threads behind
        subprocess.run([sys.executable, "-m", "elastic_harness", "track", str(folder), name], check=True, timeout=120)
    assert sorted(READERS[name](folder / "tracking" / name)) == list(range(40))
