"""Durable training state: shared memory, folders of plain safetensors with a manifest that is written last, object
storage. An import of this package loads torch only when a name that needs it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.checkpoint.backends import MemorySnapshotBackend, NVMeBackend, S3Backend
    from elastic_harness.checkpoint.manager import CheckpointManager
    from elastic_harness.checkpoint.script_state import create_checkpoint_state, load_checkpoint_to_model
    from elastic_harness.checkpoint.state import CheckpointState, capture_rng, load_optimizer, restore_rng
    from elastic_harness.checkpoint.tiers import CheckpointTier
    from elastic_harness.config import CheckpointConfig

_HOMES = {
    "CheckpointConfig": "elastic_harness.config",
    "CheckpointManager": "elastic_harness.checkpoint.manager",
    "CheckpointState": "elastic_harness.checkpoint.state",
    "CheckpointTier": "elastic_harness.checkpoint.tiers",
    "MemorySnapshotBackend": "elastic_harness.checkpoint.backends",
    "NVMeBackend": "elastic_harness.checkpoint.backends",
    "S3Backend": "elastic_harness.checkpoint.backends",
    "capture_rng": "elastic_harness.checkpoint.state",
    "create_checkpoint_state": "elastic_harness.checkpoint.script_state",
    "load_checkpoint_to_model": "elastic_harness.checkpoint.script_state",
    "load_optimizer": "elastic_harness.checkpoint.state",
    "restore_rng": "elastic_harness.checkpoint.state",
}
__all__ = [
    "CheckpointConfig", "CheckpointManager", "CheckpointState", "CheckpointTier", "MemorySnapshotBackend",
    "NVMeBackend", "S3Backend", "capture_rng", "create_checkpoint_state", "load_checkpoint_to_model", "load_optimizer",
    "restore_rng",
]  # fmt: skip

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
