"""One tier of a `CheckpointManager` by itself. The manager does the work; these say where."""

from __future__ import annotations

from typing import ClassVar

from elastic_harness.checkpoint.manager import CheckpointManager
from elastic_harness.checkpoint.state import CheckpointState
from elastic_harness.checkpoint.tiers import CheckpointTier, Stored


class _Backend:
    tier: ClassVar[CheckpointTier]

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager

    def save(self, state: CheckpointState, *, wait: bool = False) -> None:
        """Save a state there, as `CheckpointManager.save_checkpoint`."""
        self.manager.save_checkpoint(state, self.tier, wait=wait)

    def load(self, step: int | None = None, into: CheckpointState | None = None) -> CheckpointState | None:
        """Return the newest state from there, as `CheckpointManager.load_checkpoint` with this tier."""
        return self.manager.load_checkpoint(step, into, tier=self.tier)


class MemorySnapshotBackend(_Backend):
    """Snapshots in shared memory. When this process ends, its writer brings the newest one to disk."""

    tier = CheckpointTier.MEMORY

    def list(self) -> list[Stored]:
        """Return the snapshots in memory, the newest first."""
        return [stored for stored in self.manager.stored() if stored.tier == self.tier]

    def clear(self) -> None:
        """Do as `CheckpointManager.clear_memory_snapshots`."""
        self.manager.clear_memory_snapshots()


class NVMeBackend(_Backend):
    """Checkpoints on local disk."""

    tier = CheckpointTier.NVME

    def list(self) -> list[Stored]:
        """Return the checkpoints on disk, the newest first."""
        return [stored for stored in self.manager.stored() if stored.tier == self.tier]


class S3Backend(_Backend):
    """Checkpoints in object storage: those that are saved here go to disk first, and are uploaded beside training."""

    tier = CheckpointTier.S3
