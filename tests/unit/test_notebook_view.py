"""What a cell shows of a job: the panel, and the buttons."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.errors import HarnessError
from elastic_harness.notebook import view
from elastic_harness.runs.story import Story, tell_story


def committed(step: int, loss: float | None) -> dict[str, Any]:
    told = {"t": 100.0 + step, "event": "step_committed", "step": step, "loss": loss, "tokens": 10}
    return {**told, "world_size": 2, "generation": 1, "lineage": 0}


def story() -> Story:
    """Two workers, ten steps of twenty; one worker is lost in step 4, and loss 6 is not finite."""
    started = [
        {"t": 90.0, "event": "worker_started", "member": f"w{place}-1", "pid": 7 + place, "rank": place}
        for place in (0, 1)
    ]
    generation = {"t": 91.0, "event": "generation", "number": 1, "members": ["w0-1", "w1-1"]}
    lost = {"t": 103.5, "event": "failure_detected", "member": "w1-1", "t_detected": 103.5}
    recovered = {"t": 104.0, "event": "recovery", "generation": 2, "total_ms": 12.4, "resumed_step": 4}
    recovered["stages"] = {"rebuild_ms": 11.0}
    steps = [committed(step, None if step == 6 else 5.0 - step / 10) for step in range(10)]
    told = tell_story([*started, generation, *steps[:4], lost, recovered, *steps[4:]])
    told.max_steps = 20
    return told


def panel(told: Story, **more: Any) -> view.Panel:
    fields = {"title": "train()", "state": "running", "run_dir": Path("runs/a"), "news": (), "output": ()}
    return view.Panel(**{**fields, "story": told, "failed": False, "ended": False, **more})


def test_the_panel_tells_progress_workers_loss_and_recoveries() -> None:
    shown = view.as_html(panel(story(), output=["[w0] <script>alert(1)</script>"]), hint="interrupt")
    assert "10/20 steps" in shown and "width:50.0%" in shown and "loss 4.1000" in shown
    assert "● rank 0 w0-1" in shown and "● rank 1 w1-1" not in shown
    assert "w1-1 was lost" in shown and "recovered in 12 ms (rebuild 11), goes on with step 5" in shown
    assert shown.count("<line ") == 1 and len(re.findall(r"[\d.]+,[\d.]+", shown.partition("points=")[2])) == 9
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "interrupt" in shown
    assert view.as_html(panel(Story(), state="failed (exit code 1)", failed=True, ended=True)).count("<div>") == 1


def test_outside_of_a_notebook_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = view.choose({})
    assert isinstance(lines, view.LineView)
    lines.show(panel(story(), news=["[w0] one"]))
    lines.show(panel(story(), news=["[w0] two"], output=["[w0] one", "[w0] two"], state="finished", ended=True))
    assert capsys.readouterr().out == "[w0] one\n[w0] two\ntrain(): finished\n"


def test_a_button_says_what_it_has_done_or_why_not() -> None:
    def refused() -> str:
        raise HarnessError("no worker <b> is running")

    *buttons, said = view._buttons({"Kill": lambda: "killed w1-1", "Add": refused}).children
    assert [button.description for button in buttons] == ["Kill", "Add"]
    buttons[0].click()
    assert said.value == "killed w1-1"
    buttons[1].click()
    assert "no worker &lt;b&gt; is running" in said.value


def test_without_ipywidgets_there_are_no_buttons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert view._buttons({"Kill": lambda: ""}) is None
