"""What Linux tells of a process, whatever its name is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from elastic_harness import processes


def test_the_states_of_a_process_whose_name_looks_like_a_state(tmp_path: Path) -> None:
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "a) Z 1 (b")
    child = subprocess.Popen([program, "60"])
    started = processes.stat(child.pid).started_at
    assert int(started) >= int(processes.stat(os.getpid()).started_at)

    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert processes.stat(child.pid) == processes.Stat("T", started)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.stat(child.pid) == processes.Stat("Z", started, wait_status=signal.SIGKILL)
    assert child.pid in processes.children()

    child.wait()
    assert processes.stat(child.pid) == processes.Stat()
