"""The tiers as one. Workers copy the state to shared memory beside training. A writer takes it on to disk and object
storage. It is loaded from the nearest tier that has it complete.

    begin_snapshot (one process of the node)  →  every worker copies its share  →  finish_copy, before the state changes
    writer: seal → write → prune → upload
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from elastic_harness.checkpoint.disk import local, manifest
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest
from elastic_harness.checkpoint.disk.parts import Part
from elastic_harness.checkpoint.disk.reading import BlockSource, Folder, fill
from elastic_harness.checkpoint.layout import Piece, Slice
from elastic_harness.checkpoint.memory.snapshot import Frames, Snapshot, SnapshotOutcome
from elastic_harness.checkpoint.policy import Policy
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.checkpoint.tensors import empty_whole, flat_bytes
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError
from elastic_harness.failpoints import failpoint

POLL_S = 0.002
Report = Callable[[str, dict[str, Any]], None]
Into = Callable[[set[str]], Mapping[Slice, memoryview]]


class CheckpointTier(Enum):
    """Where a checkpoint is: in shared memory, on local disk, in object storage."""

    MEMORY = "memory"
    NVME = "nvme"
    S3 = "s3"


class WriterAlive(Protocol):
    """The object that keeps the writer running. Its method raises InfrastructureError if that is impossible."""

    def keep_alive(self) -> None: ...


class Stored(NamedTuple):
    """A version that could be loaded."""

    version: int
    tier: CheckpointTier
    meta: dict[str, Any]


@dataclass(frozen=True)
class Captured:
    """A state that is to be saved. `part`: of a checkpoint that several processes write."""

    version: int
    skeleton: Mapping[str, Any]
    tensors: Mapping[Slice, Tensor]  # they must not change before they are copied
    meta: Mapping[str, Any]
    policy: Policy
    part: Part | None = None

    @property
    def header(self) -> dict[str, Any]:
        """What a snapshot holds beside the tensors, as JSON."""
        part = None if self.part is None else asdict(self.part)
        return {"skeleton": self.skeleton, "meta": self.meta, "policy": self.policy.to_json(), "part": part}


class Loaded(NamedTuple):
    """A loaded state. `tensors` are whole and on the CPU. `repaired` names what was damaged and taken from another
    tier."""

    skeleton: dict[str, Any]
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    tier: CheckpointTier
    repaired: list[str]


class Tiers:
    """One process's access to its node's shared memory and to the folder of checkpoints. `writer` keeps the writer
    running, if this process has to do that. `report(event, fields)` is told of what is loaded."""

    def __init__(
        self, frames: Frames, folder: Path, writer: WriterAlive | None = None, report: Report = lambda *_: None
    ) -> None:
        self.folder = folder
        self._frames = frames
        self._writer = writer
        self._report = report
        self._copying: threading.Thread | None = None
        self._attempt = 0  # the last attempt of which this process copied a share
        self._error: BaseException | None = None
        self._corrupt: set[tuple[CheckpointTier, int]] = set()
        self._told: set[str] = set()  # what was passed over

    # ---- saving

    def begin_snapshot(self, state: Captured, *, shares: int = 1, to_disk: bool = True) -> Snapshot | None:
        """Open a snapshot and start copying this process's share of it, the first. Return None if all frames are in
        use. The tensors must not change before `finish_copy`. Does not block, except for an earlier copy."""
        self.finish_copy()
        if self._writer is not None:
            self._writer.keep_alive()
        lineage = int(state.meta.get("lineage", 0))
        snapshot = self._frames.open_snapshot(
            state.version, lineage, list(state.tensors), state.header, shares=shares, to_disk=to_disk
        )
        if snapshot is not None:
            failpoint("checkpoint.begun", state.version)
            self._start(snapshot, state.tensors, 0)
        return snapshot

    def awaited(self, version: int, shares: int) -> Snapshot | None:
        """Return the snapshot of this version of which this process still has to copy a share. Another process has
        begun it."""
        snapshot = self._frames.begun()
        if snapshot is None or snapshot.control.attempt == self._attempt:
            return None
        wanted = snapshot.version == version and snapshot.control.shares == shares
        return snapshot if wanted and not snapshot.complete else None

    def copy_share(self, snapshot: Snapshot, tensors: Mapping[Slice, Tensor], index: int) -> None:
        """Start copying a share of a snapshot that another process has begun. Blocks only for an earlier copy, as
        `begin_snapshot` does."""
        self.finish_copy()
        self._start(snapshot, tensors, index)

    def _start(self, snapshot: Snapshot, tensors: Mapping[Slice, Tensor], index: int) -> None:
        self._attempt = snapshot.control.attempt
        self._copying = threading.Thread(
            target=self._copy, args=(snapshot, tensors, index), name="checkpoint-copy", daemon=True
        )
        self._copying.start()

    def _copy(self, snapshot: Snapshot, tensors: Mapping[Slice, Tensor], index: int) -> None:
        try:
            mine = snapshot.share(index)
            if any(piece.slice not in tensors for piece in mine):
                raise InfrastructureError("This worker's state has other tensors than that of the one that began.")
            snapshot.populate(mine)
            copy(snapshot, tensors, mine)
            failpoint("checkpoint.copied", snapshot.version)
            snapshot.finish_share(index)
            self._frames.wake()
        except BaseException as error:  # thread boundary: raised again by `finish_copy`
            if snapshot.here:  # otherwise a newer snapshot has its frame by now, and nobody misses this one
                self._error = error

    @property
    def copying(self) -> bool:
        """Whether the state must not change yet."""
        return self._copying is not None and self._copying.is_alive()

    def finish_copy(self) -> None:
        """Block until this process's share is copied. Raises the error of that copy."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def clear_memory(self) -> None:
        """Offer no snapshot in memory any more, except those that are still on their way to disk."""
        for snapshot in self._frames.copied():
            with snapshot.pinned() as pinned:
                if pinned and not snapshot.waits_for_disk:
                    snapshot.drop()

    def busy(self) -> bool:
        """Return whether the writer has something to write to disk."""
        return any(snapshot.waits_for_disk for snapshot in self._frames.complete())

    def newest(self) -> Snapshot | None:
        """The newest snapshot that is copied, if there is one."""
        return next(iter(self._frames.copied()), None)

    def wait(self, snapshot: Snapshot) -> SnapshotOutcome:
        """Block until it is settled on disk, or until there is no more hope for that. It is copied, or nobody but
        this process copies it."""
        while snapshot.here and snapshot.outcome == SnapshotOutcome.OPEN and (self.copying or snapshot.copied):
            if self._writer is not None:
                self._writer.keep_alive()
            time.sleep(POLL_S)
        return snapshot.outcome

    # ---- loading

    def stored(self) -> list[Stored]:
        """Return what could be loaded from memory or disk. The newest comes first, and of equal versions the one in
        memory. Versions that were found damaged are left out. A snapshot counts once it is sealed."""
        found = [
            Stored(snapshot.version, CheckpointTier.MEMORY, _meta(snapshot))
            for snapshot in self.sealed()
            if (CheckpointTier.MEMORY, snapshot.version) not in self._corrupt
        ]
        found += [
            Stored(checkpoint.step, CheckpointTier.NVME, checkpoint.meta)
            for checkpoint in newest(self.folder)
            if (CheckpointTier.NVME, checkpoint.step) not in self._corrupt
        ]
        return sorted(found, key=lambda stored: (-stored.version, stored.tier != CheckpointTier.MEMORY))

    def fetch(self, url: str) -> None:
        """Bring the newest checkpoint from object storage, if there is none in memory or on disk. Report what is not
        complete there. Raises InfrastructureError if the storage cannot be read, because to begin at step 0 would be
        worse."""
        if not self.stored():
            pulled = transfer.pull_newest(url, self.folder, self._passed_over)
            if pulled is not None:
                self._corrupt.discard((CheckpointTier.NVME, pulled.step))  # not the one that was found damaged
                self._report("checkpoint_downloaded", {"step": pulled.step, "url": url})

    def tell_passed_over(self) -> None:
        """Report, once, the folders on disk that have the name of a checkpoint and are not complete. An older one may
        be taken."""
        for path, reason in manifest.passed_over(self.folder).items():
            self._passed_over(str(path), reason)

    def _passed_over(self, where: str, reason: str) -> None:
        if where not in self._told:
            self._told.add(where)
            self._report("checkpoint_passed_over", {"where": where, "error": f"{where} is not whole: {reason}."})

    def load(self, version: int, into: Into | None = None, *, from_memory: bool = True) -> Loaded:
        """Return the state of a version, from memory or else from disk. Each piece is checked, and a damaged piece is
        taken from the other tier. `into` is given the names of the stored tensors and returns the memory to fill, in
        place of whole tensors. Raises CheckpointCorrupt if no tier has the state complete. The version is not offered
        again then."""
        try:
            loaded = self._load(version, into, from_memory=from_memory)
        except CheckpointCorrupt as error:
            self._report("checkpoint_corrupt", {"step": version, "error": str(error)})
            raise
        if loaded.repaired:
            self._report("checkpoint_repaired", {"step": version, "repaired": loaded.repaired})
        self._report("checkpoint_loaded", {"step": version, "tier": loaded.tier.value})
        return loaded

    def _load(self, version: int, into: Into | None, *, from_memory: bool) -> Loaded:
        sealed = self.sealed() if from_memory and (CheckpointTier.MEMORY, version) not in self._corrupt else []
        snapshot = next((s for s in sealed if s.version == version), None)
        checkpoint = next((c for c in newest(self.folder) if c.step == version), None)
        errors = []
        if snapshot is not None:
            try:
                return self._load_snapshot(snapshot, checkpoint, into)
            except CheckpointCorrupt as error:
                errors.append(f"{error} It was in memory.")
                self._corrupt.add((CheckpointTier.MEMORY, version))
                snapshot.drop()
        if checkpoint is not None:
            try:
                return _load_folder(checkpoint, into)
            except CheckpointCorrupt as error:
                self._corrupt.add((CheckpointTier.NVME, version))
                aside = local.quarantine(checkpoint)
                errors.append(f"{error} It is now {aside}." if aside is not None else str(error))
        raise CheckpointCorrupt(" ".join(errors) or f"Version {version} is no longer in {self.folder}.")

    def _load_snapshot(self, snapshot: Snapshot, checkpoint: Checkpoint | None, into: Into | None) -> Loaded:
        with snapshot.pinned(), ExitStack() as opened:
            sources: list[BlockSource] = [snapshot]
            if checkpoint is not None:
                with suppress(CheckpointCorrupt):
                    sources.append(opened.enter_context(Folder(checkpoint)))
            tensors, targets = targets_of(snapshot.positions, into)
            repaired = fill(sources, targets)
            header = snapshot.header
            return Loaded(header["skeleton"], tensors, header["meta"], CheckpointTier.MEMORY, repaired)

    def sealed(self) -> list[Snapshot]:
        """Return the snapshots that can be checked. Block for a while if the writer is still hashing a complete one."""
        for snapshot in self._frames.complete():
            give_up_at = time.monotonic() + 1.0 + snapshot.control.nbytes / 1e8
            self._frames.wake()
            while not snapshot.sealed and snapshot.here and time.monotonic() < give_up_at:
                time.sleep(POLL_S)
        return [snapshot for snapshot in self._frames.complete() if snapshot.sealed]


def copy(snapshot: Snapshot, tensors: Mapping[Slice, Tensor], mine: Sequence[Piece]) -> None:
    """Copy these pieces of the tensors, which may be on any device, into the snapshot's memory. On the CPU one thread
    makes a few large calls. Torch would use as many threads as training has, and slow training down."""
    of: Slice | None = None
    for piece in mine:
        failpoint("checkpoint.copying", snapshot.version)
        if piece.nbytes:
            if piece.slice != of:
                of, content = piece.slice, flat_bytes(tensors[piece.slice])
            into = torch.frombuffer(snapshot.view(piece), dtype=torch.uint8)
            if content.device.type == "cpu":
                ctypes.memmove(into.data_ptr(), content.data_ptr() + piece.low, piece.nbytes)
            else:
                into.copy_(content[piece.low : piece.high])


def _load_folder(checkpoint: Checkpoint, into: Into | None) -> Loaded:
    with Folder(checkpoint) as source:
        tensors, targets = targets_of(checkpoint.blocks, into)
        fill([source], targets)
    return Loaded(checkpoint.manifest["skeleton"], tensors, checkpoint.meta, CheckpointTier.NVME, [])


def targets_of(stored: Iterable[Piece], into: Into | None) -> tuple[dict[str, Tensor], Mapping[Slice, memoryview]]:
    """Return the memory to fill with the stored pieces. Without `into` that is the memory of new whole tensors, which
    are returned too. Otherwise `into` gives the memory."""
    if into is None:
        return empty_whole(stored)
    return {}, into({piece.slice.tensor for piece in stored})


def _meta(snapshot: Snapshot) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = snapshot.header["meta"]
        return meta
    except (CheckpointCorrupt, KeyError):
        return {}
