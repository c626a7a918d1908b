"""`elastic-harness launch` from Python, for a script that starts jobs. `notebook` has more for those who watch."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from elastic_harness.agent.options import parse
from elastic_harness.errors import ConfigError
from elastic_harness.processes import die_with_parent


def launch(command: Sequence[str | Path], **options: object) -> int:
    """Run a job to its end, and return its exit code.

    command: a script, or "-m" and a module, with its arguments. options: those of `elastic-harness launch`, with "_" in
    place of "-", as in launch(["train.py", "--lr", "0.1"], nproc_per_node=2, run_dir="runs/a", fresh=True). The job
    runs in processes of its own. Nothing of it is in this process, not even a signal handler. KeyboardInterrupt stops
    the job at the next step boundary, and a second one stops it at once. The job does not outlive this process. Raises
    ConfigError for wrong options.
    """
    job = begin(checked_arguments(command, options))
    while True:
        try:
            return job.wait()
        except KeyboardInterrupt:
            job.send_signal(signal.SIGINT)


def checked_arguments(command: Sequence[str | Path], options: dict[str, object]) -> list[str]:
    """Return the arguments of `elastic-harness launch` for this command and these options. Raises ConfigError."""
    arguments = [*_spelled(options), *map(str, command)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parse(arguments)
    except SystemExit:
        raise ConfigError(f"launch() was given {arguments}: {said.getvalue().strip().splitlines()[-1]}") from None
    return arguments


def begin(
    arguments: Sequence[str], output: BinaryIO | None = None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start `elastic-harness launch` in a folder, and return its process. It prints into `output`, or where this
    process does. It ends in good order when the calling thread ends, however that happens."""
    parent = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "elastic_harness", "launch", *arguments],
        cwd=folder,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # a terminal's Ctrl-C comes to this process alone, and once
        preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
    )


def _spelled(options: dict[str, object]) -> list[str]:
    """Return the options as on a command line, without those that are False or None."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            spelled = "--" + name.replace("_", "-")
            words.append(spelled if value is True else f"{spelled}={value}")
    return words
