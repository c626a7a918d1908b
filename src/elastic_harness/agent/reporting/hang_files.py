"""The files with all stacks of a hang, in the run folder."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from elastic_harness.runs.folder import HANGS

FILES_MAX = 20


def write(run: Path, member: str, text: str) -> Path | None:
    """Write a file about a hang of `member`, and remove the oldest ones beyond FILES_MAX. Return its path, None if that
    was not possible. A training job does not fail for want of it."""
    folder = run / HANGS
    path = folder / f"{member.replace('/', '.')}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        folder.mkdir(exist_ok=True)
        path.write_text(text, errors="backslashreplace")
        for old in sorted(folder.glob("*.txt"), key=lambda each: each.stat().st_mtime_ns)[:-FILES_MAX]:
            old.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    return path
