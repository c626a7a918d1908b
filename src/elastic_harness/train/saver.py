"""Saves and restores checkpoints of the run: a copy of the state, written to disk by a thread of its own."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_harness.checkpoint import local
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError
from elastic_harness.failpoints import failpoint
from elastic_harness.train.state import Registry


class Saver:
    """One member's access to the run's checkpoint folder. `save` copies the state and returns; at most one write is
    under way. `report(event, fields)` tells what was saved or why it could not be."""

    def __init__(
        self, folder: Path, registry: Registry, keep_last: int, report: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._folder = folder
        self._registry = registry
        self._keep_last = keep_last
        self._report = report
        self._writer: threading.Thread | None = None
        self._corrupt: set[int] = set()
        self._copies: dict[str, Tensor] = {}
        self._newest: tuple[int, int] | None = None  # lineage and version of the last save begun here

    def save(self, version: int, lineage: int) -> None:
        """Start saving the state as it is now, unless that was the last thing saved; blocks for the copy, and for the
        previous write if that still runs."""
        self.wait()
        if self._newest == (lineage, version):
            return
        self._newest = (lineage, version)
        skeleton, tensors = self._registry.capture()
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        self._copies = copies
        failpoint("checkpoint.copied", version)
        self._writer = threading.Thread(
            target=self._write, args=(version, lineage, skeleton, copies), name="checkpoint-writer"
        )
        self._writer.start()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the CPU, in the memory of the last one, which is written by now: fresh memory costs many times what
        copying does."""
        kept = self._copies.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept.copy_(tensor.detach())

    def save_unless_saved(self, version: int, lineage: int) -> None:
        """Save where no rank 0 is there to do it: several members may try, one after the other, and one write is
        enough. Blocks until that is on disk."""
        self.wait()
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if version not in self.restorable():
                self.save(version, lineage)
                self.wait()
        finally:
            os.close(descriptor)  # and with it goes the lock

    def _write(self, version: int, lineage: int, skeleton: dict[str, Any], tensors: dict[str, Any]) -> None:
        start = time.perf_counter()
        try:
            path = local.save(self._folder, version, skeleton, tensors, {"lineage": lineage, "version": version})
            failpoint("checkpoint.written", version)
            local.prune(self._folder, self._keep_last)
        except (InfrastructureError, OSError) as error:
            print(f"elastic-harness: {error}", file=sys.stderr, flush=True)
            self._report("checkpoint_failed", {"step": version, "error": str(error)})
            return
        self._report(
            "checkpoint_saved",
            {
                "step": version,
                "path": str(path),
                "seconds": time.perf_counter() - start,
                "bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
            },
        )

    def wait(self) -> None:
        """Block until the write under way, if any, is done."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def restorable(self) -> tuple[int, ...]:
        """Versions that could be restored, newest first; without those found corrupt."""
        return tuple(c.step for c in local.newest(self._folder) if c.step not in self._corrupt)

    def restore(self, version: int) -> None:
        """Overwrite the whole state with a checkpoint's. Raises CheckpointCorrupt; it is not offered again then."""
        found = next((c for c in local.newest(self._folder) if c.step == version), None)
        try:
            if found is None:
                raise CheckpointCorrupt(f"checkpoint of version {version} is no longer in {self._folder}")
            skeleton, tensors, _ = local.load(found)
        except CheckpointCorrupt as error:
            self._corrupt.add(version)
            aside = None if found is None else local.quarantine(found)
            self._report("checkpoint_corrupt", {"step": version, "error": str(error), "moved_to": aside and str(aside)})
            raise
        self._registry.restore(skeleton, tensors)
        self._report("checkpoint_loaded", {"step": version, "path": str(found.path)})
