"""What tests fork in place of `python script …` ends, and says, as that would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from integration import script_tools
from integration.script_tools import forked, python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "body",
    [
        "print(sys.argv[1:], os.getcwd(), os.environ['MORE'], sys.stdin.read())",
        "print('said'); sys.exit('a reason')",
        "import atexit; atexit.register(print, 'at the end'); raise ValueError('of the user')",
        "print('said'); os.kill(os.getpid(), 9)",
        "print(sorted(os.listdir('/proc/self/task')) == [str(os.getpid())], os.getpgid(0) == os.getpid())",
    ],
)
def test_both_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\n{body}\n")
    monkeypatch.chdir(tmp_path)
    here, there = (run(script, "--lr", 3, MORE="1") for run in (forked, python))
    assert here.stdout and (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


def test_one_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, harmless = tmp_path / "script.py", tmp_path / "harmless.py"
    script.write_text("import time; time.sleep(600)\n")
    harmless.write_text("")
    monkeypatch.setattr(script_tools, "PATIENCE_S", 1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        forked(script)
    assert forked(harmless).returncode == 0


def test_what_python_reads_when_it_starts_is_not_left_to_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="PYTHONOPTIMIZE"):
        forked(__file__, PYTHONOPTIMIZE="1")
