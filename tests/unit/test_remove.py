"""`elastic-harness rm` removes what a run wrote, and nothing else."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_harness import cli, file_lock
from elastic_harness.commands.rm import WRITTEN


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(name: str, *, age_s: float = 0.0) -> Path:
    """A run folder with everything that may be in one."""
    path = Path("runs") / name
    for folder in ("checkpoints/step-00000001", "logs"):
        (path / folder).mkdir(parents=True)
    for file in ("checkpoints/step-00000001/manifest.json", "logs/agent.log", "run.json", "events.jsonl", "lock"):
        (path / file).write_text("{}")
    (path / ".run.json.77").write_text("")
    for each in path.rglob("*"):
        os.utime(each, (time.time() - age_s,) * 2)
    return path


def test_what_a_run_writes_goes_and_the_rest_stays(capsys: pytest.CaptureFixture[str]) -> None:
    gone, kept = made("a"), made("b")
    (kept / "notes.txt").write_text("mine")
    assert cli.main(["rm", "--yes", "a", "runs/b"]) == 0
    assert not gone.exists() and [p.name for p in kept.iterdir()] == ["notes.txt"]
    said = capsys.readouterr().out
    assert "removed runs/a\n" in said and "left: notes.txt" in said


def test_a_live_run_is_refused_and_others_go(capsys: pytest.CaptureFixture[str]) -> None:
    live, saving, gone = made("live"), made("saving"), made("gone")
    held = [file_lock.take(live / "lock", ""), file_lock.take(saving / "writer.lock", "")]
    before = sorted(live.rglob("*")) + sorted(saving.rglob("*"))
    assert cli.main(["rm", "--yes", "live", "saving", "gone"]) == 1
    assert sorted(live.rglob("*")) + sorted(saving.rglob("*")) == before and not gone.exists()
    assert capsys.readouterr().err.count("is live: process") == 2
    for descriptor in held:
        os.close(descriptor)


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    live, gone = made("live"), made("gone")
    (gone / "notes.txt").write_text("mine")
    held = file_lock.take(live / "lock", "")
    assert cli.main(["rm", "--yes", "--json", "live", "gone"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["removed"] == [{"run_dir": "runs/gone", "bytes": 10, "left": ["notes.txt"], "checkpoints": None}]
    assert list(told["refused"]) == ["runs/live"] and "is live: process" in err
    assert cli.main(["rm", "--json", "live"]) == 2 and "--yes" in capsys.readouterr().err
    os.close(held)
    assert cli.main(["rm", "--json", "--yes", "--older-than", "1d"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [], "refused": {}}


def test_those_that_are_old_go() -> None:
    made("old", age_s=8 * 86400), made("new"), (Path("runs") / "data").mkdir()
    live = made("live", age_s=9 * 86400)
    held = file_lock.take(live / "lock", "")
    os.utime(live / "lock", (0, 0))
    assert cli.main(["rm", "--yes", "--older-than", "7d"]) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["data", "live", "new"]
    os.close(held)


def test_checkpoints_elsewhere_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made("a")
    os.rename(run / "checkpoints", tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert cli.main(["rm", "--yes", "a"]) == 0
    assert not run.exists() and (tmp_path / "elsewhere" / "step-00000001" / "manifest.json").exists()
    assert "stay in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "name the runs"),
        (["a", "--older-than", "7d"], "name the runs"),
        (["--older-than", "7"], "such as 7d"),
        (["--older-than", "-1d"], "such as 7d"),
        (["missing", "--yes"], "there is no run 'missing'"),
        (["runs", "--yes"], "there is no run 'runs'"),
        (["a"], "no terminal; say --yes"),
    ],
)
def test_what_is_not_clear_removes_nothing(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = made("a")
    try:
        code = cli.main(["rm", *words])
    except SystemExit as error:  # argparse: -1d looks like an option
        code, named = int(str(error)), "expected one argument"
    assert code == 2 and named in capsys.readouterr().err and (run / "run.json").exists()


@pytest.mark.parametrize(("answer", "stays"), [(b"n\n", True), (b"\n", True), (b"y\n", False)])
def test_it_asks_first(answer: bytes, stays: bool) -> None:
    run = made("a")
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "elastic_harness", "rm", "a"]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE)
    os.write(mine, answer)
    said, _ = process.communicate(timeout=60)
    os.close(mine), os.close(theirs)
    assert b"remove it? [y/N]" in said and run.exists() is stays


def test_everything_that_is_documented_goes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text().partition("## Events")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    documented = {name.split("/")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert documented and documented <= set(WRITTEN)
