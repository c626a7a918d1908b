"""The report of any run, on made-up logs: where the time went, what was kept, and that nothing of a log is executed."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from elastic_harness import cli
from elastic_harness.report import figures
from unit.made_up_run import make_run
from unit.test_episodes import STEP_S, Log


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = report(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)["figures"]


# ---- the page


def test_the_headline_counts_alarms_and_requests_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(5).add("alarm", kind="disk", code="EH-T104").commit(3).lost("b", "EH-W101").commit(3)
    folder = log.add("run_finished", status="stopped", exit_code=143).write(tmp_path / "run")
    assert report(capsys, folder)[0] == 0
    page = (folder / "run-report.html").read_text()
    assert re.search(r"stopped: 11 steps, 1 failure, 1 alarm, 1 time asked to stop, [\d.]+ % of the time", page)


def test_the_error_says_what_helps_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Log(5).write(tmp_path / "run")
    code, _, said = report(capsys, folder, "-o", tmp_path / "nowhere" / "r.html")
    assert code == 4 and "-o FILE" in said and "resume" not in said


# ---- figures


def test_the_parts_of_the_time_add_up() -> None:
    log = Log(10).lost("b", "EH-W101").commit(after_s=STEP_S + 2).commit(9)
    log.add("run_finished", status="failed", exit_code=3, code="EH-L106")
    log.add("run_started", after_s=50).commit(5, after_s=STEP_S)
    log.add("run_finished", status="stopped", exit_code=143).add("run_started", after_s=1000).commit(5)
    log.add("run_finished", after_s=0.25, status="finished", exit_code=0)
    parts = figures.account(log.tale())
    assert parts.held_up_s == pytest.approx(2, abs=0.1)
    assert parts.down_s == pytest.approx(50) and parts.paused_s == pytest.approx(1000)
    assert parts.after_s == pytest.approx(0.25)
    assert parts.trained_s == pytest.approx(30 * STEP_S, abs=1.0)
    split = (parts.start_s, parts.trained_s, parts.held_up_s, parts.down_s, parts.paused_s, parts.after_s)
    assert sum(split) == pytest.approx(parts.wall_s)
    assert parts.effective == pytest.approx(parts.trained_s / (parts.wall_s - 1000))


def test_a_run_without_a_step_has_trained_nothing() -> None:
    parts = figures.account(Log(0).add("waiting", after_s=5, reason="1 of 3").tale())
    assert parts.trained_s == 0 and parts.effective == 0 and parts.start_s == parts.wall_s


def test_steps_that_are_computed_again_hold_the_run_up() -> None:
    log = Log(20).add("evicted", member="c", reason="bits", code="EH-C101")
    log.add("rollback", to=10, members=["a"], reason="bits")
    log.step = 10
    log.commit(12, lineage=1)
    (cost,) = figures.held_up(log.tale())
    assert cost == pytest.approx(10 * STEP_S, abs=0.1)


def test_the_throughput_after_a_loss_is_measured_until_all_are_there_again() -> None:
    log = Log(10).lost("b", "EH-W101").commit(5, world_size=2, step_s=STEP_S * 1.25).commit(5)
    (episode,) = log.tale().episodes
    kept = figures.kept(log.tale(), episode)
    assert kept == figures.KeptThroughput(3, 2, 5, pytest.approx(0.8))
    log = Log(10).lost("b", "EH-W101").commit(5)
    assert figures.kept(log.tale(), log.tale().episodes[0]) is None, "a spare took the place at once"
    log = Log(10).lost("b", "EH-W101").commit(2, world_size=2)
    assert figures.kept(log.tale(), log.tale().episodes[0]) is None, "too few steps to tell"


def test_recoveries_are_held_against_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(10).members("m0.2", "m3.0", "m1.0")
    for late_s in (0.2, 3.0, 1.0):
        log.lost(f"m{late_s}", "EH-W101").commit(after_s=STEP_S + late_s).commit(5)
    run = log.write(tmp_path)
    for target, within in (("5s", 3), ("1500ms", 2), ("0.1", 0)):
        assert told(capsys, run, "--target-recovery", target)["within_target"] == within
    assert told(capsys, run)["within_target"] is None
    assert told(capsys, run)["held_up_s_worst"] == pytest.approx(3.0, abs=0.05)


# ---- the page

HOSTILE = "<script>alert('x')</script>$\\frac"


def hostile() -> Log:
    """A run whose logs were written by somebody who wants to be executed."""
    log = Log(6).add("worker_started", member=HOSTILE, pid=7).members("a", HOSTILE)
    log.lost(HOSTILE, "EH-U101").incident(HOSTILE, "EH-U101", evidence=[HOSTILE], done=HOSTILE, log=HOSTILE, step=6)
    log.add("exchange_broke", member="a", peers=["b"], error=HOSTILE).commit(3)
    return log.add("run_finished", status="failed", exit_code=1, message=HOSTILE, code="EH-U107")


@pytest.mark.slow
def test_nothing_of_a_log_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run = hostile().write(tmp_path / "<img src=x>")
    code, _, err = report(capsys, run)
    assert code == 0, err
    page = (run / "run-report.html").read_text()
    assert "<script" not in page and "<img src=x" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page), "the page must load nothing from outside"
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    for picture in pictures:
        assert "script" not in {
            each.tag.rpartition("}")[2] for each in ElementTree.fromstring(base64.b64decode(picture)).iter()
        }
    assert len(pictures) >= 3
    assert 'class="verdict bad"' in page and "failed: 9 steps" in page


@pytest.mark.slow
def test_the_report_of_a_run_has_every_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    kills = make_run(tmp_path / "run", 3, workers=4, steps=60, strikes=5)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (tmp_path / "run" / "events.jsonl").write_text("\n".join([*lines[:9], "{damaged", *lines[9:]]) + "\n")
    code, out, err = report(capsys, tmp_path / "run", "--target-recovery", "300ms", "-o", tmp_path / "page.html")
    assert code == 0, err
    assert str(tmp_path / "page.html") in out and not (tmp_path / "run" / "run-report.html").exists()
    page = (tmp_path / "page.html").read_text()
    assert "finished: 60 steps" in page and "% of the time trained" in page and 'class="verdict good"' in page
    assert page.count("EH-W101</td>") == len(kills)
    assert page.count("<td>met</td>") == len(kills) and "recoveries within the target of 0.3 s" in page
    assert "1 damaged line was passed over" in page
    for kill in kills:
        assert all(member in page for member in kill.members)


def test_wrong_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Log(3).write(tmp_path / "run")
    for wrong in ("soon", "0s", "5 s", "nan"):
        code, _, err = report(capsys, run, "--target-recovery", wrong)
        assert code == 2 and "must be a time above 0 such as 5s" in err
    assert report(capsys, tmp_path / "nowhere")[0] == 2
    (tmp_path / "empty").mkdir()
    assert "there is no events.jsonl in" in report(capsys, tmp_path / "empty")[2]
    assert report(capsys, Log(0).write(tmp_path / "early"))[0] == 0, "no step is committed yet"
    code, _, err = report(capsys, run, "-o", tmp_path / "no" / "page.html")
    assert code in (2, 4) and "page.html" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "elastic_harness.report.run", raising=False)
    monkeypatch.delitem(sys.modules, "elastic_harness.report.page", raising=False)
    code, _, err = report(capsys, run)
    assert code == 2 and "pip install 'elastic-harness[report]'" in err
    assert told(capsys, run)["steps"] == 3, "the figures need no matplotlib"
