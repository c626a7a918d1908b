"""`--json` of commands that have no tests of their own: one document on standard output, errors on the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_harness import cli, file_lock
from elastic_harness.runs import folder as folders


@pytest.fixture
def run(tmp_path: Path) -> Path:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    (logs / "worker-0-w0-1.log").write_bytes(b'one\nsaid "\xff"\nno newline')
    (logs / "agent.log").write_text("trouble\n")
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, str]]:
    assert cli.main(list(map(str, words))) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_logs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"log": "worker-0-w0-1.log", "line": line} for line in ("one", 'said "\ufffd"', "no newline")]
    assert said(capsys, "logs", run, "w0", "--json") == lines
    assert said(capsys, "logs", run, "0", "-n", 1, "--json") == lines[-1:]
    assert {"log": "agent.log", "line": "trouble"} in said(capsys, "logs", run, "--json", "--follow")
    assert cli.main(["logs", str(run), "w7", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "there is no log of worker 'w7'" in err


def test_logs_of_a_live_run_come_in_whole_lines(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = file_lock.take(run / folders.LOCK, "busy", wait_s=0.0)

    def end(_: float) -> None:
        with open(run / "logs" / "agent.log", "a") as log:
            log.write(" is over")
        os.close(held)

    (run / "logs" / "agent.log").write_text("first\nthe run")
    monkeypatch.setattr("elastic_harness.commands.manage.time.sleep", end)
    lines = [each["line"] for each in said(capsys, "logs", run, "agent", "--json", "--follow")]
    assert lines == ["first", "the run is over"]
