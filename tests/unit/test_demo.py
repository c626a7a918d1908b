"""The demo's machinery, driven by a stand-in for the launcher: killing, following, cleaning up."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from elastic_harness import cli
from elastic_harness.demo import driver
from elastic_harness.demo.screen import render
from elastic_harness.runs.events import EventTail
from elastic_harness.runs.story import tell_story
from elastic_harness.watched_job import Job

STAND_IN = Path(__file__).with_name("made_up_run.py")


def test_tail_gives_each_line_once_and_waits_for_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    with open(path, "w", buffering=1) as file:
        file.write('{"event": "a"}\n{"eve')
        file.flush()
        assert [event["event"] for event in tail.read()] == ["a"]
        file.write('nt": "b"}\nno json\n')
        file.flush()
        assert [event["event"] for event in tail.read()] == ["b"]
        assert tail.read() == []


FAKE_LAUNCH = """
import json, os, subprocess, sys, time
out = open(sys.argv[1], "w", buffering=1)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for event in ({"event": "run_started", "lineage": 0},
              {"event": "worker_started", "member": "m0", "pid": child.pid},
              {"event": "generation", "number": 1, "members": ["m0"]}):
    out.write(json.dumps({"t": time.time(), **event}) + "\\n")
sys.exit(child.wait() != -9)
"""


def _wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


def test_job_kills_the_process_it_knows_and_notes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAKE_LAUNCH, str(tmp_path / "events.jsonl")]
    with Job(command, tmp_path, tmp_path / "out", max_steps=1, workers=1) as job:
        _wait_for(lambda: job.advance() and bool(job.story.up()))
        kill = job.kill([0], time.time(), "plan")
        assert kill is not None and kill.members == ("m0",)
        _wait_for(lambda: not job.advance())
        assert job.exit_code == 0, "the worker must have died of SIGKILL"
        assert job.story.workers["m0"].end == "killed"
        assert job.kill([0], time.time(), "plan") is None, "who is dead cannot be killed again"


def test_job_left_early_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Job(command, tmp_path, tmp_path / "out", max_steps=1, workers=1) as job:
        assert job.advance()
    assert job.exit_code == -signal.SIGTERM


def test_demo_is_importable_without_torch() -> None:
    code = (
        "import sys, elastic_harness.demo.driver, elastic_harness.watched_job, elastic_harness.runs.verify\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _processes_of(run_dir: Path) -> list[int]:
    """The workers of a run that still exist, by the events it left."""
    events = (json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines())
    pids = [event["pid"] for event in events if event["event"] == "worker_started"]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a short demo whose command line is the stand-in."""
    monkeypatch.setattr(driver, "cli", lambda *words: [sys.executable, str(STAND_IN), *words])
    return ["--seed", "4", "--runs-dir", str(tmp_path / "runs"), "--plain", "training.max_steps=40"]


@pytest.mark.slow
def test_demo_passes_leaves_a_report_and_no_process(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MADE_UP_DEATHS", "6")
    assert cli.main(["demo", *arguments, "--json"]) == 0
    out, said = capsys.readouterr()
    shown = json.loads(out)
    assert shown["outcome"]["ok"] and "def made_up" in shown["sample"] and len(shown["report"]) == 2
    assert "VERDICT: nothing was lost" in said and "def made_up" in said
    assert said.count("  KILL  ") == 5
    storm, calm = sorted((tmp_path / "runs").iterdir())
    facts = json.loads((storm / "demo.json").read_text())
    assert facts["outcome"]["ok"] is True and len(facts["kills"]) == 5
    killed = [rank for kill in facts["kills"] for rank in kill["ranks"]]
    assert 0 in killed and len(killed) == 6, "one strike must hit rank 0, and one two workers"
    assert (storm / "report.html").stat().st_size > 10_000 and (storm / "report.png").exists()
    assert (storm / "logs" / "launch.log").exists()
    assert not _processes_of(storm) and not _processes_of(calm)


@pytest.mark.slow
def test_demo_fails_if_the_weights_differ(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MADE_UP_DIFFERENT_WEIGHTS", "1")
    assert driver.main(arguments) == 1
    assert "NOT identical" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_demo_interrupted_leaves_no_process(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    obey = driver._obey
    seen = []

    def interrupt(pressed: str, job: Job, *rest: object) -> None:
        obey(pressed, job, *rest)  # type: ignore[arg-type]
        if job.story.up() and not seen:
            seen.append(job.run_dir)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(driver, "_obey", interrupt)
    arguments[-1] = "training.max_steps=4000"  # more than it can get done before it is interrupted
    assert driver.main(arguments) == code
    assert not _processes_of(seen[0])


def test_demo_quits_and_kills_on_keys(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = iter(["", "2", "k", "q"])
    jobs: list[Job] = []
    obey = driver._obey

    def press(_: str, job: Job, *rest: object) -> None:
        if len(job.story.up()) == 4:
            jobs.append(job)
            obey(next(pressed), job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(driver, "_obey", press)
    assert driver.main(arguments) == 130
    by_hand = [kill for kill in jobs[0].kills if kill.by == "key"]
    assert len(by_hand) == 2 and by_hand[0].ranks == (2,)
    assert not _processes_of(jobs[0].run_dir)


def test_demo_says_what_went_wrong_when_the_launch_fails(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "cli", lambda *words: [sys.executable, "-c", "raise SystemExit('no corpus here')"])
    assert driver.main(arguments) == 4
    said = capsys.readouterr().err
    assert "exit code 1" in said and "no corpus here" in said


def test_demo_refuses_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--workers", "1"]) == 2
    assert driver.main(["training.max_stepz=3"]) == 2
    assert "max_steps" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_place_fits_the_window(width: int) -> None:
    members = [f"w{place}-1" for place in range(6)]
    events = [
        {"t": 1.0, "event": "worker_started", "pid": 3159800 + place, "member": member, "local_index": place}
        for place, member in enumerate(members)
    ]
    events.append({"t": 2.0, "event": "generation", "number": 1, "members": members, "urgent": True, "reason": ""})
    console = RichConsole(width=width, file=io.StringIO())
    console.print(render(tell_story(events, []), [], "run 1 of 2", "k kills a random worker", width))
    for rank in range(6):
        assert f"rank {rank} pid {3159800 + rank} " in console.file.getvalue()
