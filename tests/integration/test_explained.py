"""One run in which a worker is killed, one stopped, and a sample is not finite: its story has the right codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.launch_tools import run
from integration.script_tools import SCRIPTS, failing, launch, said

pytestmark = pytest.mark.slow
FAULTS = "lane.finished member=w0-1 step=3 kill; slot.forward member=w1-1 step=5 stop"
CODES = ["EH-N101", "EH-W101", "EH-H102", "EH-N101", "EH-N101"]  # the sample is read in the steps 1, 7 and 9
STOPPED_S = 1.5  # the deadline of a slot is at least 2 s, of which a part is over before it is seen


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained") / "run"
    options = ("--nproc-per-node", 2, "--spares", 1)
    ended = launch(folder, SCRIPTS / "nonfinite.py", "sample", "--rejoin-at", 5, options=options, **failing(FAULTS))
    assert ended.returncode == 0, said(ended)
    for code in set(CODES):
        assert f"│ code      {code} " in ended.stdout, "the code is on the screen"
    return folder


def asked(*arguments: object) -> Any:
    ended = run(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_story_has_each_failure_once_with_its_code(run_dir: Path) -> None:
    story = asked("explain", run_dir)
    failures = [failure for episode in story["episodes"] for failure in episode["failures"]]
    assert [failure["code"] for failure in failures] == CODES
    killed, stopped = failures[1], failures[2]
    assert (killed["member"], killed["step"], killed["domain"], killed["retry"]) == ("w0-1", 3, "unknown", "yes")
    assert (stopped["member"], stopped["step"]) == ("w1-1", 5)
    assert [failure["step"] for failure in failures if failure["code"] == "EH-N101"] == [1, 7, 9]
    by_code = {episode["failures"][0]["code"]: episode for episode in story["episodes"]}
    assert by_code["EH-H102"]["cost_s"] > STOPPED_S and by_code["EH-W101"]["cost_s"] is not None
    assert by_code["EH-N101"]["cost_s"] is None
    assert (story["state"], story["code"], story["damaged"]) == ("finished", None, [])


def test_the_story_is_told_in_words_and_from_the_file_of_the_hang(run_dir: Path) -> None:
    told = run("explain", run_dir).stdout
    assert told.index("EH-W101 killed from outside, step 3") < told.index("EH-H102 a worker was stopped, step 5")
    below = [line for line in told.splitlines() if line.lstrip().startswith("└")]
    assert all("EH-L101 an exchange broke" in line for line in below), "each failure is a cause of its own"
    (stacks,) = (run_dir / "hangs").iterdir()
    about = [(failure["code"], failure["member"]) for failure in asked("explain", stacks)["failures"]]
    assert about[-1] == ("EH-H102", "w1-1") and {member for _, member in about} == {"w1-1"}


def test_the_report_measures_it(run_dir: Path) -> None:
    figures = asked("report", run_dir, "--target-recovery", "10m")["figures"]
    assert (figures["recoveries"], figures["within_target"]) == (2, 2)
    assert asked("report", run_dir, "--target-recovery", "1s")["figures"]["within_target"] < 2
    assert figures["held_up_s"] > STOPPED_S and 0 < figures["effective"] < 1
