"""Which checkpoints stay, and the names `latest` and `best` that lead to two of them.

Everything is computed anew from the folder's content, so the next call repairs what a crash in the middle left.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest

LATEST, BEST = "latest", "best"


class Retention(NamedTuple):
    """Which checkpoints stay: the `keep_last` newest; every one whose step is a multiple of `keep_every` (0: none for
    that reason); and the `keep_best` best by `metric` of those that have it. `mode`: whether "min" or "max" is
    better."""

    keep_last: int = 3
    keep_every: int = 0
    keep_best: int = 0
    metric: str = "loss"
    mode: str = "min"


def by_metric(found: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return the checkpoints that have the metric, the best first, the newer first of equals."""
    sign = 1 if retention.mode == "min" else -1
    valued = []
    for checkpoint in found:
        value = (checkpoint.meta.get("metrics") or {}).get(retention.metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            valued.append((sign * value, -checkpoint.step, checkpoint))
    return [checkpoint for _, _, checkpoint in sorted(valued, key=lambda item: item[:2])]


def superfluous(found: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return which of the valid checkpoints, newest first, need not stay. The newest always stays. So do those from
    before the last row of updates that were skipped for being non-finite. What a later lineage has saved is newer,
    because the run has gone back for it."""
    found = sorted(found, key=lambda checkpoint: (checkpoint.lineage, checkpoint.step), reverse=True)
    stay = {checkpoint.step for checkpoint in found[: max(1, retention.keep_last)]}
    stay |= {checkpoint.step for checkpoint in by_metric(found, retention)[: retention.keep_best]}
    stay |= before_nonfinite([checkpoint.step for checkpoint in found], found[0].meta) if found else set()
    if retention.keep_every:
        stay |= {checkpoint.step for checkpoint in found if checkpoint.step % retention.keep_every == 0}
    return [checkpoint for checkpoint in found if checkpoint.step not in stay]


def before_nonfinite(steps: Sequence[int], newest_meta: Mapping[str, Any]) -> set[int]:
    """Return the step at which updates became non-finite, and the newest step before it, as far as `steps` has them.
    Only of the step before it is known that a step from its weights was finite. `newest_meta`: of the newest
    checkpoint."""
    since = newest_meta.get("nonfinite_since")
    if not isinstance(since, int):
        return set()
    return {step for step in steps if step == since} | {max((step for step in steps if step < since), default=since)}


def prune(folder: Path, retention: Retention, in_use: Collection[int] = ()) -> list[Path]:
    """Remove the checkpoints that need not stay, and return their paths. Damaged checkpoints stay for people to look
    at, and steps that are in use stay. Then point `latest` and `best` to the newest and the best checkpoint."""
    removed = []
    for checkpoint in superfluous(newest(folder), retention):
        if checkpoint.step not in in_use:
            local.remove(checkpoint.path)
            removed.append(checkpoint.path)
    point(folder, retention)
    return removed


def point(folder: Path, retention: Retention) -> None:
    """Point `latest` and `best` to the newest checkpoint and the best. They are conveniences for people: the package
    does not read them, and a file system without symbolic links does not have them."""
    found = newest(folder)
    _link(folder / LATEST, found[0] if found else None)
    best = by_metric(found, retention)
    _link(folder / BEST, best[0] if best else None)


def _link(name: Path, checkpoint: Checkpoint | None) -> None:
    with contextlib.suppress(OSError):
        if checkpoint is None:
            name.unlink()
        elif not name.is_symlink() or os.readlink(name) != checkpoint.path.name:
            temporary = name.with_name(f".{name.name}.{os.getpid()}")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(checkpoint.path.name)
            os.replace(temporary, name)
