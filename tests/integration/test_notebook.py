"""A notebook's kernel that launches jobs, interrupts them, runs a cell twice, and dies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from elastic_harness import processes
from integration.launch_tools import environment, left_behind, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of Jupyter's own libraries
]
PATIENCE_S = 60.0
DEFINE = """
import time
from dataclasses import dataclass
from pathlib import Path
from elastic_harness.notebook import launch

@dataclass
class Where:
    folder: str

def train(folder):
    Path(Where(folder).folder, "began").touch()
    print("a worker has begun", flush=True)
    time.sleep(600)
"""


class Kernel:
    """A kernel in a process of its own, and what a front end would do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.manager, self._client = start_new_kernel(cwd=str(folder), env=environment())

    def begin(self, cell: str) -> str:
        return self._client.execute(cell.replace("RUN", repr(str(self.run_dir))))

    def end(self, message: str) -> dict[str, Any]:
        """What a cell has given: "text" that it printed, its "panel", its "error"."""
        shown = {"text": "", "panel": "", "error": ""}
        while True:
            heard = self._client.get_iopub_msg(timeout=PATIENCE_S)
            if heard["parent_header"].get("msg_id") != message:
                continue
            kind, content = heard["msg_type"], heard["content"]
            if kind == "stream":
                shown["text"] += content["text"]
            elif kind == "update_display_data":
                shown["panel"] = content["data"].get("text/html", "") or shown["panel"]
            elif kind == "error":
                shown["error"] = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return shown

    def cell(self, cell: str) -> dict[str, Any]:
        return self.end(self.begin(cell))

    def until_begun(self) -> None:
        until(lambda: (self.folder / "began").exists(), "a worker has begun")

    def record(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "run.json").read_text())

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE_S} s for: {what}"
        time.sleep(0.01)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    try:
        assert kernel.cell(DEFINE)["error"] == ""
        yield kernel
    finally:
        kernel.close()
        assert not left_behind(kernel.run_dir)


CALL = "launch(train, ({folder!r},), nproc=2, run_dir=RUN"
BLOCKING = CALL + ")"
WAITING = "with " + CALL + ", wait=False) as job:\n    job.wait_for_step(1)"


def test_an_interrupt_of_the_cell_stops_the_job(kernel: Kernel) -> None:
    """Also of one that waits for something of the job; the second launch resumes the folder of the first."""
    for cell in (BLOCKING, WAITING):
        (kernel.folder / "began").unlink(missing_ok=True)
        running = kernel.begin(cell.format(folder=str(kernel.folder)))
        kernel.until_begun()
        kernel.manager.interrupt_kernel()
        shown = kernel.end(running)
        assert shown["error"].startswith("KeyboardInterrupt")
        assert "a worker has begun" in shown["panel"] and "stopped; the same run_dir=" in shown["panel"]
        assert kernel.record()["exit_code"] == 130
        assert not processes.of_run(kernel.run_dir)


def test_a_job_goes_on_beside_the_cells_and_dies_with_the_kernel(kernel: Kernel) -> None:
    again = f"job = launch(train, ({str(kernel.folder)!r},), nproc=1, run_dir=RUN, wait=False)"
    assert kernel.cell(again)["error"] == ""
    kernel.until_begun()
    assert "is live. Stop it with job.stop()" in kernel.cell(again)["error"], "the cell was run twice"
    assert "killed w0-1" in run("kill", kernel.run_dir, "w0").stdout
    told = "print(job.live, job.status()['status'], [e['member'] for e in job.events('failure_detected')])"
    assert kernel.cell(told)["text"] == "True running ['w0-1']\n"
    kernel.manager.restart_kernel(now=True)
    until(lambda: not processes.of_run(kernel.run_dir), "the job of a killed kernel to end")
    assert kernel.record()["exit_code"] == 143


def test_what_a_cell_is_told_of_a_failure(kernel: Kernel) -> None:
    shown = kernel.cell("launch(lambda: 1, run_dir=RUN)")
    assert shown["error"].startswith("ConfigError: launch() was given <lambda>")
    kernel.cell("def fails():\n    print('one')\n    raise ValueError('of the cell')")
    shown = kernel.cell("launch(fails, nproc=1, max_restarts=0, run_dir=RUN)")
    assert shown["error"].startswith("JobFailed: the job in") and "ValueError: of the cell" in shown["error"]
    assert "failed (exit code 1)" in shown["panel"]
    shown = kernel.cell(
        "def works(): print('two')\njob = launch(works, nproc=1, run_dir=RUN, fresh=True)\nprint(job.output())"
    )
    assert shown["error"] == "" and "two" in shown["text"] and "one" not in shown["text"]
