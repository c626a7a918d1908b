"""`elastic-harness init` writes a project that trains, survives a kill, and verifies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_harness import cli
from elastic_harness.commands.init import FILES
from elastic_harness.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE
from elastic_harness.runs.verify import verify
from integration.script_tools import failing, launch, said

pytestmark = pytest.mark.slow


def test_the_project_trains_and_survives_a_kill(tmp_path: Path) -> None:
    project = tmp_path / "project"
    assert cli.main(["init", str(project)]) == 0
    kill = failing("slot.forward member=w1-1 step=3 kill")
    ended = launch(
        tmp_path / "run", project / "train.py", "training.max_steps=6", options=("--nproc-per-node", 2), **kill
    )
    assert ended.returncode == 0, said(ended)
    assert verify(tmp_path / "run").ok


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == [str(tmp_path / name) for name in FILES]
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "README.md").unlink()
    assert cli.main(["init", str(tmp_path)]) == EXIT_CONFIG
    assert "nothing was written" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine" and not (tmp_path / "README.md").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["init", str(tmp_path / "file" / "project")]) in (EXIT_INFRASTRUCTURE, EXIT_CONFIG)
    assert "file" in capsys.readouterr().err
