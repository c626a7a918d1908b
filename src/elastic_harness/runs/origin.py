"""Where a run began, if it began from another run: `origin.json`, written once, before the run's first worker starts.

A new run takes the other run's whole state, or its weights alone. The settings of the program (learning rate, batch,
schedule) are the new run's own, and so is its fingerprint. The other run is only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from elastic_harness import durable_file
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.runs.ledger import LEDGER
from elastic_harness.runs.named import places

FILE = "origin.json"
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Origin:
    """The state that a run began with. It is not checked here; `find` and `read` check it."""

    run: str  # the other run's folder, absolute
    version: int  # committed steps of the state
    lineage: int  # of the other run, which the state belongs to
    weights_only: bool
    position: int  # samples that the other run had consumed by then
    data: dict[str, Any] | None  # which samples it read, and in which order
    manifest_sha256: str  # of the checkpoint

    @property
    def checkpoint(self) -> Path:
        return checkpoint_folder(self.run, self.version)

    @property
    def identity(self) -> str:
        """What members must agree on: the same state, wherever each of them reads it."""
        return f"version {self.version}, manifest {self.manifest_sha256[:16]}{', weights only' * self.weights_only}"

    def first(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """Return the first step of the new run, which reads `data`, and the position at which it begins to read. That
        is the other run's next position if both read the same samples in the same order, else 0."""
        if self.weights_only:
            return 0, 0
        return self.version, self.position if self.data == json.loads(json.dumps(data)) else 0

    def __str__(self) -> str:
        return f"{self.run}@{self.version}"


def checkpoint_folder(run: str | Path, version: int) -> Path:
    return Path(run) / CHECKPOINTS / f"step-{version:08d}"


def find(text: str, *, weights_only: bool) -> Origin:
    """Return the origin that RUN[@VERSION] names. RUN is a folder or an id under runs/. VERSION is one of its
    checkpoints (default: the newest). Raises ConfigError if there is none."""
    run, version = _run_folder(text)
    versions = versions_in(run)
    if not versions:
        raise ConfigError(f"{run} has no checkpoint to begin from; stop that run (which saves), or let it reach one")
    if version is None:
        version = versions[-1]
    if version not in versions:
        shown = ", ".join(map(str, versions[-10:]))
        raise ConfigError(f"{run} has no checkpoint of version {version}; it has {shown}")
    path = checkpoint_folder(run, version) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        meta = manifest["meta"]
        return Origin(
            run=str(run),
            version=version,
            lineage=int(manifest["lineage"]),
            weights_only=weights_only,
            position=int(meta["position"]),
            data=meta.get("data"),
            manifest_sha256=str(manifest["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be used ({type(error).__name__}: {error}); name another version: {run}@VERSION, of "
            f"{', '.join(map(str, versions[-10:]))}"
        ) from error


def claim(run_dir: Path, text: str, *, weights_only: bool) -> Origin:
    """Note in a new run's folder that it begins from RUN[@VERSION], and return that origin. If the run did begin there,
    return what was noted. Several processes may call this at once. Raises ConfigError if the run began otherwise."""
    known = read(run_dir)
    if known is None and _has_trained(run_dir):
        raise ConfigError(
            f"the run in {run_dir} has trained already and did not begin from {text}; leave that out to resume it, or "
            "give another folder"
        )
    if known is not None:
        run, version = _run_folder(text, must_exist=False)
        if (str(run), weights_only) != (known.run, known.weights_only) or version not in (None, known.version):
            raise ConfigError(
                f"the run in {run_dir} began from {known}{' (weights only)' * known.weights_only}, not from "
                f"{text}{' (weights only)' * weights_only}; leave that out to resume it, or give another folder"
            )
        return known
    _write_once(run_dir / FILE, find(text, weights_only=weights_only))
    written = read(run_dir)
    if written is None:
        raise InfrastructureError(f"{run_dir / FILE} was written and is gone; is another process clearing {run_dir}?")
    return written


def read(run_dir: Path) -> Origin | None:
    """Return the origin of the run in this folder; None if it began by itself. Raises InfrastructureError if it is
    damaged."""
    path = run_dir / FILE
    try:
        content = json.loads(path.read_bytes())
        return Origin(**{field.name: content[field.name] for field in fields(Origin)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InfrastructureError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it says which run this one began from. Restore "
            "it, or begin anew with --fresh"
        ) from error


def _write_once(path: Path, origin: Origin) -> None:
    """Write the file whole, or leave the file that another process has just written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable_file.making(path) as temporary:
            temporary.write_text(json.dumps(asdict(origin), indent=1) + "\n")
    except OSError as error:
        raise durable_file.cannot_write(path, error) from error


def _run_folder(text: str, *, must_exist: bool = True) -> tuple[Path, int | None]:
    """Return the folder and the version that RUN[@VERSION] names. A folder may have an @ in its name, as a node's
    folder has."""
    head, at, tail = text.rpartition("@")
    candidates = [(text, None), *([(head, int(tail))] if at and tail.isdecimal() else [])]
    for name, version in candidates:
        for path in places(name):
            if (path / CHECKPOINTS).is_dir():
                return path.resolve(), version
    if must_exist:
        raise ConfigError(
            f"there is no run {candidates[-1][0]!r} with checkpoints: neither that folder nor "
            f"{places(candidates[-1][0])[1]} has one named {CHECKPOINTS}; `elastic-harness ls` lists the runs"
        )
    name, version = candidates[-1]
    return Path(name).resolve(), version


def versions_in(run: Path) -> list[int]:
    """Return the versions of a run's checkpoints that have a manifest, oldest first."""
    found = (
        int(name[1])
        for path in (run / CHECKPOINTS).glob("step-*/manifest.json")
        if (name := _NAME.fullmatch(path.parent.name))
    )
    return sorted(found)


def _has_trained(run_dir: Path) -> bool:
    ledger = run_dir / LEDGER
    return ledger.exists() and ledger.stat().st_size > 0
