"""What tests fork in place of `python script …` ends, and says, as that would."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from elastic_harness.processes import of_run
from elastic_harness.runs import folder
from integration import script_tools
from integration.launch_tools import Job
from integration.preloaded import preloaded
from integration.script_tools import SCRIPTS, forked, python

pytestmark = pytest.mark.slow
OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.mark.parametrize(
    "body",
    [
        "print(sys.argv[1:], os.getcwd(), os.environ['MORE'], sys.stdin.read())",
        "print('said'); sys.exit('a reason')",
        "import atexit; atexit.register(print, 'at the end'); raise ValueError('of the user')",
        "print('said'); os.kill(os.getpid(), 9)",
        "import gc; print(len(os.listdir('/proc/self/task')), os.getpgid(0) == os.getpid(), gc.isenabled(), sys.path)",
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


def test_a_forked_launch_looks_like_a_new_one(tmp_path: Path) -> None:
    """To its worker, and to all who look into /proc, as the checks for leaks do."""
    told = []
    for popen in (preloaded().popen, subprocess.Popen):
        job = Job(
            tmp_path / "run",
            tmp_path / "told",
            script=SCRIPTS / "relatives.py",
            options=("--nproc-per-node", 1, "--run-id", "run"),
            popen=popen,
        )
        with contextlib.closing(job):
            assert job.wait() == 0, job.output
        told.append(json.loads((tmp_path / "told").read_text()))
        shutil.rmtree(tmp_path / "run")
    here, there = told
    for process, facts in there.items():
        for name, fact in facts.items():
            assert here[process][name] == fact, f"{name} of the {process}"


def test_what_is_forked_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", "--steps", 100000, script=OWN_LOOP, popen=preloaded().popen)
    with contextlib.closing(job):
        job.until_step(2)
        seen = {job.process.pid, job.record()["agent_pid"], job.pid("w0-1")}
        assert seen < set(of_run(job.run_dir)), "the leak check does not see them"
        job.process.kill()
        assert job.wait() == -signal.SIGKILL
        os.close(folder.acquire(job.run_dir))
