"""The run folder: which job holds it, and what it remembers of the run (`run.json`)."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, file_lock, shape
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.omissions import Entry
from elastic_harness.runs import named

RECORD = "run.json"
LOCK = "lock"
HANGS = "hangs"
_SHAPE: shape.Shape = {
    **dict.fromkeys(("run_id", "cwd", "status", "history", "mode", "control"), str | None),
    "doubts": list[tuple[int, int]] | None,
    "omissions": list[Entry] | None,
    **dict.fromkeys(("lineage", "from_step", "exit_code", "agent_pid", "launcher_pid"), int | None),
    **dict.fromkeys(("options", "fingerprint"), dict[str, Any] | None),
    "argv": list[str] | None,
    "created": float | None,
    **dict.fromkeys(("born", "saved"), bool | None),
}


class RunFolder:
    """A run's folder. `record` is the content of run.json, and `save` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: dict[str, Any] = read_record(path) or {}
        self._incarnations: dict[int, int] = {}

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def next_incarnation(self, index: int) -> int:
        """Return a number that no worker at this local index had before. Their logs are named by it."""
        logged = [f.stem.rpartition("-")[2] for f in self.logs.glob(f"worker-{index}-w{index}-*.log")]
        number = 1 + max((int(n) for n in logged if n.isdigit()), default=0)
        number = max(number, self._incarnations.get(index, 0) + 1)
        self._incarnations[index] = number
        return number

    def update(self, **fields: Any) -> None:
        self.record.update(fields)
        self.save()

    def save(self) -> None:
        durable_file.remove_leftovers(self.path / RECORD)
        durable_file.write(self.path / RECORD, json.dumps(self.record, indent=1).encode() + b"\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the content of run.json, None if there is none."""
    try:
        text = (path / RECORD).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InfrastructureError(f"cannot read {path / RECORD}: {error.strerror}") from error
    try:
        record = shape.parse_object(text)
        shape.expect(record, _SHAPE)
    except ValueError as error:
        raise InfrastructureError(
            f"{path / RECORD} is damaged ({error}); restore it, or start anew with --fresh (the old folder is kept)"
        ) from error
    return record


def new_run_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S") + "-" + os.urandom(2).hex()


def resolve(name: str) -> Path:
    """Return the folder of an existing run, given as a path or as an id under runs/. With several nodes it is the
    folder of the node here."""
    found = named.holding(name, RECORD)
    if len(found) == 1:
        return found[0].resolve()
    if found:
        nodes = ", ".join(map(str, found))
        raise ConfigError(f"the run {name!r} has the folders of {len(found)} nodes here: name one of {nodes}")
    here, below = named.places(name)
    raise ConfigError(
        f"there is no run {name!r}: neither {here} nor {below} holds a {RECORD}; `elastic-harness ls` lists the runs"
    )


def set_aside(path: Path) -> Path:
    """Move an existing run folder out of the way; nothing is deleted."""
    target = path.with_name(f"{path.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.old-{time.strftime('%Y%m%d-%H%M%S')}-{number}")
    os.rename(path, target)
    return target


def acquire(path: Path) -> int:
    """Create the folder if needed, take its lock, and return the lock's descriptor. A job whose launcher is gone leaves
    once its last snapshot is on disk; this function waits for that."""
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureError(
            f"cannot use the run folder {path}: {error.strerror}; choose another --run-dir or make it writable"
        ) from error
    busy = (
        f"the run in {path} is live: process {{holder}} holds it. Stop it with `elastic-harness stop {path}`, or "
        "choose another --run-dir"
    )
    return file_lock.take(path / LOCK, busy)


def locked(path: Path) -> bool:
    """True while a live job holds the folder."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def control_of(path: Path) -> str:
    """Return the control socket of a live run. Raises ConfigError if it is not live."""
    record = read_record(path) or {}
    if not locked(path) or not record.get("control"):
        raise ConfigError(f"the run in {path} is not live; start it with: elastic-harness resume {path}")
    return str(record["control"])
