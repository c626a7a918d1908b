"""Runs the scripts in scripts/ in every way a user would: plain python, the launcher, torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_harness.contract.variables import FAILPOINTS
from integration.launch_tools import command, environment, left_behind
from integration.preloaded import ONE_THREAD, preloaded

SCRIPTS = Path(__file__).with_name("scripts")
PATIENCE_S = 240.0


def python(script: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """A script under plain python, to its end."""
    return execute([sys.executable, script, *arguments], more)


def forked(script: object, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """The same, without the time that Python and torch take to start: for runs that are not about how they begin."""
    given = [sys.executable, *map(str, (script, *arguments))]
    return preloaded().run(given, {**environment(), **ONE_THREAD, **more}, PATIENCE_S)


def launch(
    run_dir: Path, script: Path, *arguments: object, options: tuple[object, ...] = (), anew: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """A script under our launcher, to its end; nothing may be left behind. The launcher is `forked`, or begins anew."""
    given = command("launch", "--standalone", "--run-dir", run_dir, *options, script, *arguments)
    ended = execute(given, more) if anew else preloaded().run(given, {**environment(), **more}, PATIENCE_S)
    assert not left_behind(run_dir)
    return ended


def execute(given: Sequence[object], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, given)),
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
