"""Runs the scripts in scripts/ in every way a user would: plain python, the launcher, torchrun."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
from pathlib import Path

from elastic_harness.contract.variables import FAILPOINTS
from integration.launch_tools import environment, left_behind
from integration.preloaded import Preloaded

SCRIPTS = Path(__file__).with_name("scripts")
PATIENCE_S = 240.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as workers have it: another one does not live on in a forked process


def python(script: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """A script under plain python, to its end."""
    return execute([sys.executable, script, *arguments], more)


def forked(script: Path | str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """The same, without the time that Python and torch take to start: for runs that are not about how they begin."""
    command = [sys.executable, *map(str, (script, *arguments))]
    return preloaded().run(command, {**environment(), **ONE_THREAD, **more}, PATIENCE_S)


@functools.cache
def preloaded() -> Preloaded:
    process = Preloaded({**environment(), **ONE_THREAD})
    atexit.register(process.close)
    return process


def launch(
    run_dir: Path, script: Path, *arguments: object, options: tuple[object, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """A script under our launcher, to its end; nothing may be left behind."""
    ended = execute(
        [
            *(sys.executable, "-m", "elastic_harness", "launch", "--standalone"),
            *("--run-dir", run_dir, *options, script, *arguments),
        ],
        more,
    )
    assert not left_behind(run_dir)
    return ended


def execute(command: list[object], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        env={**environment(), **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def failing(rules: str) -> dict[str, str]:
    """The environment that makes workers fail at named places."""
    return {FAILPOINTS: rules}


def finals(text: str) -> list[str]:
    """What the script said about its final state, once for every worker that got to the end."""
    return [line[line.index("final-") :] for line in text.splitlines() if "final-" in line]


def said(ended: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {ended.returncode}\n{ended.stdout[-6000:]}\n{ended.stderr[-3000:]}"


def one_message(ended: subprocess.CompletedProcess[str]) -> str:
    """The error of a process that failed: without a traceback."""
    text = ended.stdout + ended.stderr
    assert "Traceback" not in text, said(ended)
    return text


