"""`elastic-harness rm`: removes run folders that nobody needs any more. Only files that a run wrote are removed. Other
files in a folder stay, and so do checkpoints that are kept elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_harness import file_lock
from elastic_harness.errors import EXIT_SUCCESS, EXIT_USER_CODE, ConfigError, HarnessError
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS
from elastic_harness.runs.ledger import LEDGER
from elastic_harness.runs.named import RUNS, places

# The order matters: without the first it is no run any more, and until the last is gone `rm` still knows the folder.
WRITTEN = (
    folders.RECORD, "checkpoints", "logs", folders.HANGS, "weights.safetensors", LEDGER, "generation",
    "fingerprint.json", "doubt.json", "origin.json", "replay.json", "imports.json", "config.yaml", "tracking",
    "control.sock", "demo.json", "report.html", "report.png", "run-report.html", EVENTS, "writer.lock", folders.LOCK,
)  # fmt: skip
_UNIT_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: Sequence[str]) -> int:
    """Remove runs, after asking."""
    parser = argparse.ArgumentParser(prog="elastic-harness rm", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run folder, or an id below runs/")
    parser.add_argument("--older-than", metavar="AGE", help="all below runs/ that ended so long ago: 12h, 7d, 2w")
    parser.add_argument("--folder", type=Path, default=RUNS, help="where --older-than looks (default: runs)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="what was removed as one JSON object; with --yes")
    given = parser.parse_args(list(argv))
    if bool(given.runs) == (given.older_than is not None):
        raise ConfigError("name the runs to remove, or say --older-than AGE; `elastic-harness ls` lists the runs")
    found = [_run_at(name) for name in given.runs] if given.runs else _older(given.folder, _seconds(given.older_than))
    if given.json and not given.yes:
        raise ConfigError("--json leaves no place for a question: say --yes too")
    words = sys.stderr if given.json else sys.stdout
    if not found:
        print(f"no run below {given.folder} ended more than {given.older_than} ago", file=words)
    for path in found:
        print(f"{path}  {_size(path) / 1e6:,.1f} MB, last written {_day(path)}", file=words)
    if found and not given.yes and not _agreed(len(found)):
        print("nothing was removed")
        return EXIT_USER_CODE
    removed, refused = list[Removed](), dict[str, str]()
    for path in found:
        try:
            removed.append(remove(path))
            print(removed[-1].in_words(), file=words)
        except HarnessError as error:
            refused[str(path)] = str(error)
            print(f"elastic-harness rm: {error}", file=sys.stderr)
    if given.json:
        print(json.dumps({"removed": [asdict(each) for each in removed], "refused": refused}))
    return EXIT_USER_CODE if refused else EXIT_SUCCESS


@dataclass(frozen=True)
class Removed:
    """A run that was removed."""

    run_dir: str
    bytes: int
    left: tuple[str, ...]  # in its folder, which is not its own
    checkpoints: str | None  # where its checkpoints are kept, which stay; None: they were in the folder

    def in_words(self) -> str:
        run = self.run_dir
        said = f"removed {run}" if not self.left else f"removed the run in {run}; not its own, so left: "
        said += ", ".join(self.left)
        return said if self.checkpoints is None else f"{said}; its checkpoints stay in {self.checkpoints}"


def remove(path: Path) -> Removed:
    """Remove what a run wrote, and its folder if nothing else is in it. Raises ConfigError for a live run. The run's
    locks are held meanwhile, so that it cannot be resumed while it is half removed."""
    before = _size(path)
    busy = f"the run in {path} is live: process {{holder}} holds it; stop it with `elastic-harness stop {path}` first"
    with contextlib.ExitStack() as held:
        for name in (folders.LOCK, "writer.lock"):
            if name == folders.LOCK or (path / name).exists():
                held.callback(os.close, file_lock.take(path / name, busy, wait_s=0.0))
        elsewhere = path / "checkpoints"
        target = elsewhere.resolve() if elsewhere.is_symlink() else None
        for name in WRITTEN:
            _remove(path / name)
        for temporary in path.glob(f".{folders.RECORD}.*"):
            _remove(temporary)
    left = tuple(sorted(each.name for each in path.iterdir()))
    freed = before - _size(path)
    if not left:
        path.rmdir()
    return Removed(str(path), freed, left, None if target is None else str(target))


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot remove {error.filename or path}: {error.strerror}") from error


def _is_run(path: Path) -> bool:
    return (path / folders.RECORD).is_file() or (path / EVENTS).is_file()


def _run_at(name: str) -> Path:
    """Return the folder of a run, with an agent or without one."""
    for path in places(name):
        if _is_run(path):
            return path
    return folders.resolve(name)


def _older(root: Path, age_s: float) -> list[Path]:
    runs = [path for path in sorted(root.iterdir()) if _is_run(path)] if root.is_dir() else []
    return [path for path in runs if time.time() - _written_at(path) > age_s and not folders.locked(path)]


def _files(path: Path) -> Iterable[os.stat_result]:
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                yield (Path(folder) / name).lstat()


def _written_at(path: Path) -> float:
    """Return when the run last wrote anything."""
    return max((status.st_mtime for status in _files(path)), default=0.0)


def _size(path: Path) -> int:
    return sum(status.st_size for status in _files(path))


def _day(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(_written_at(path)))


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}[mhdw]", text, re.ASCII):
        raise ConfigError(f"--older-than is {text!r}; it must be a number with m, h, d or w, such as 7d")
    return float(int(text[:-1]) * _UNIT_S[text[-1]])


def _agreed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked whether to remove {count} runs: there is no terminal; say --yes")
    return input(f"remove {'it' if count == 1 else f'these {count} runs'}? [y/N] ").strip().lower() in ("y", "yes")
