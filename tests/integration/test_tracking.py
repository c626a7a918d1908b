"""The documented way to loss curves: one curve without gaps and overlaps, whoever is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.launch_tools import SOURCE, environment
from integration.script_tools import failing, launch, said

pytestmark = pytest.mark.slow
EXAMPLES = SOURCE.parent / "examples"
STEPS = 30


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that loses rank 0, and later all of its workers at once."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    rules = "slot.backward member=w0-1 step=7 kill; slot.backward member=w1-1 step=25 kill; "
    rules += "slot.backward member=w0-2 step=25 kill"
    ended = launch(
        folder, EXAMPLES / "own_loop.py", "--steps", STEPS, options=("--nproc-per-node", 2), **failing(rules)
    )
    assert ended.returncode == 0, said(ended)
    return folder


def tracked(*arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / "track.py"), *map(str, arguments)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_each_step_is_there_once_in_the_end(run_dir: Path) -> None:
    head, *rows = tracked(run_dir).splitlines()
    curve: dict[int, list[str]] = {}
    for row in rows:
        if row.startswith("#"):
            void = int(row.split("step ")[1].split()[0])
            curve = {step: figures for step, figures in curve.items() if step < void}
        else:
            step, *figures = row.split(",")
            assert int(step) == len(curve), "a step is missing, or comes twice"
            curve[int(step)] = figures
    assert list(curve) == list(range(STEPS)) and head.startswith("step,loss,")
    assert any(row.startswith("#") for row in rows), "the run never went back"


def test_tensorboard_shows_one_curve(run_dir: Path, tmp_path: Path) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # started twice, the folder is the same
        tracked(run_dir, "--tensorboard", tmp_path)
        curve = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        curve.Reload()
        assert [event.step for event in curve.Scalars("loss")] == list(range(STEPS))
