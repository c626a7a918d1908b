"""Burn-in with real processes: sound ones agree; one that computes otherwise, or dies, is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elastic_harness.commands.burn_in import MODULE
from elastic_harness.errors import EXIT_INFRASTRUCTURE, EXIT_OTHER_BITS, EXIT_SUCCESS
from integration.launch_tools import SOURCE, command, environment

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
QUICK = ("--minutes", 0, "--memory", 4)
FLIPS = """
import sys
if "elastic_harness.gpt.burn_in" in sys.orig_argv:
    import torch.nn.functional as F
    cross_entropy, calls = F.cross_entropy, []
    def flipped(*given):
        calls.append(given)
        return cross_entropy(*given) * (1 + 2**-20 if len(calls) == 8 + 3 else 1)
    F.cross_entropy = flipped
"""


def burn_in(*options: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("burn-in", *options), env={**environment(), **more}, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_sound_workers_agree() -> None:
    ended = burn_in(*QUICK, "--on", 2, "--json")
    assert ended.returncode == EXIT_SUCCESS, ended
    found = json.loads(ended.stdout)
    assert found["same"] and found["hash"] and [row["name"] for row in found["workers"]] == ["w0", "w1"]
    assert all(row["rounds"] >= 2 and not row["others"] and not row["damage"] for row in found["workers"])
    assert not alive([row["pid"] for row in found["workers"]])


def test_a_slot_with_another_bit_is_named_with_worker_and_device(tmp_path: Path) -> None:
    """The loss of the eleventh slot is another one in its last bits: slot 2 of the second round."""
    (tmp_path / "sitecustomize.py").write_text(FLIPS)
    ended = burn_in(*QUICK, "--on", 1, PYTHONPATH=f"{tmp_path}:{SOURCE}")
    assert ended.returncode == EXIT_OTHER_BITS, ended
    assert "DIFFERS: w0 on " in ended.stdout
    assert "1 of 16 slots otherwise than the first time; slot 2 in round 1 gave" in ended.stdout
    assert "SAME" not in ended.stdout


def test_a_worker_that_is_killed_is_named() -> None:
    given = command("burn-in", *QUICK, "--on", 2)
    process = subprocess.Popen(given, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end, workers = time.monotonic() + PATIENCE_S, []
    while len(workers) < 2 and time.monotonic() < end:
        workers = workers_of(process.pid)
    os.kill(workers[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_INFRASTRUCTURE, output
    assert "BROKEN: w1 on " in output and "was ended by SIGKILL, after 0 rounds" in output, output
    assert not alive(workers)


def workers_of(pid: int) -> list[int]:
    """The workers that a burn-in has started, in the order in which it did."""
    return alive(list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())))


def alive(pids: list[int]) -> list[int]:
    """Those that are workers of a burn-in."""
    return [pid for pid in pids if MODULE.encode() in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
