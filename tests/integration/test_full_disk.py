"""A real disk that fills up: one message and exit code 4; with space again the same run goes on, and is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.script_tools import SCRIPTS, execute, forked, launch, one_message, said

pytestmark = pytest.mark.slow
ODD = SCRIPTS / "odd.py"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB. Skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True).returncode:
        pytest.skip("missing program or permission: mount")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, but: int) -> Path:
    """Leave so many bytes."""
    there = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(there.f_bavail * there.f_frsize - but))
    return filler


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "alone"])
def test_a_full_disk_is_one_message_and_the_run_goes_on_with_space(small_disk: Path, launched: bool) -> None:
    run = small_disk / "run"

    def train() -> subprocess.CompletedProcess[str]:
        return launch(run, ODD, "none", 0) if launched else forked(ODD, "none", 0, "--run-dir", run)

    filler = fill(small_disk, 24 << 10)
    ended = train()
    assert ended.returncode == 4, said(ended)
    assert "No space left on device" in one_message(ended) and "free space" in one_message(ended), said(ended)
    filler.unlink()
    listed = execute([sys.executable, "-m", "elastic_harness", "ls", small_disk, "--json"], {})
    assert listed.returncode == 0, said(listed)
    again = train()
    assert again.returncode == 0, said(again)
    verdict = verify(run)
    assert verdict.ok and verdict.steps == 20 and not verdict.damaged, str(verdict)
    assert [e["step"] for e in read_events(run / "events.jsonl") if e["event"] == "step_committed"][-1] == 19
    assert json.loads((run / ("run.json" if launched else "fingerprint.json")).read_text())
