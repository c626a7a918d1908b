"""When this member saves the run's state, and how it gets it back: the training side of the tiers.

On each node the first worker (alone on its machine, that is rank 0) decides when a snapshot is due and begins it; all
workers there copy their share while they compute the next step, and nobody applies that step before its share is
copied.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from elastic_harness import file_lock
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.interval import LastSaved
from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.memory.snapshot import Frames, Snapshot, SnapshotOutcome
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.policy import policy_of
from elastic_harness.checkpoint.saver import Saver
from elastic_harness.checkpoint.tensors import slice_of
from elastic_harness.checkpoint.tiers import POLL_S, Captured, CheckpointTier, Report, Tiers
from elastic_harness.config import CheckpointConfig
from elastic_harness.contract import shared_frames, variables
from elastic_harness.contract.checkpoint_event import print_alarm
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.membership.types import node_of
from elastic_harness.train.inherited import Inherited
from elastic_harness.train.nonfinite import BEGIN
from elastic_harness.train.nonfinite import NAME as NONFINITE
from elastic_harness.train.standalone import busy
from elastic_harness.train.state import Registry

Describe = Callable[[], dict[str, Any]]


class RunSaver:
    """A worker's saving and restoring. `inherited`: the state of the run that this one began from."""

    def __init__(self, saver: Saver, registry: Registry, inherited: Inherited | None = None) -> None:
        self._saver = saver
        self._tiers = saver.tiers
        self._registry = registry
        self._inherited = inherited

    # ---- saving

    def save_if_due(
        self,
        version: int,
        lineage: int,
        from_step: int,
        world: int,
        describe: Describe,
        *,
        uploads: bool = True,
        needed: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """As the first worker: begin a snapshot if one is due and a frame is free. `from_step`: where this lineage
        began. `world`: how many workers copy a share. `uploads`: whether it may go to object storage. `needed`: a
        version that is to be on disk, or a later one, whatever the interval; 0: none. `patience_s`: how long to wait
        for a free frame. Must be followed by `finish_copy` before the state changes."""
        self._saver.check()
        on_disk, in_memory = self._last_saved(lineage, from_step)
        tier = self._saver.due(version, on_disk, in_memory)
        if needed > on_disk.version:
            tier = CheckpointTier.NVME
        if tier is not None:
            shares = 1 if self.alone else world  # no other process has our memory
            with self._saver.reported(version):
                state, give_up_at = self._state(version, lineage, describe, uploads), time.monotonic() + patience_s
                to_disk = tier == CheckpointTier.NVME
                while self._saver.begin_snapshot(state, to_disk=to_disk, shares=shares) is None:
                    if patience_s and time.monotonic() >= give_up_at:
                        raise InfrastructureError(
                            f"Earlier checkpoints were not written within {patience_s:g} s, so there is no room in "
                            f"memory for version {version}, which may be among the best."
                        )
                    if not patience_s:
                        return
                    time.sleep(POLL_S)

    def copy_share(self, version: int, place: int, shares: int) -> None:
        """As another worker: start copying this one's share if the first has begun a snapshot of this version. `place`:
        among the workers of this node, who are `shares`. Costs microseconds if there is none. Does not block."""
        if place == 0:
            return
        awaited = self._tiers.awaited(version, shares)
        if awaited is not None:
            with self._saver.reported(version):
                self._tiers.copy_share(awaited, self._capture()[1], place)

    def note_loss(self) -> None:
        """Note that a worker was lost: it counts for intervals that follow the failure rate."""
        self._saver.timing.failures += 1

    @property
    def alone(self) -> bool:
        """Whether this process has a writer of its own, so that nobody else saves the run."""
        return self._saver.alone

    @property
    def copying(self) -> bool:
        return self._tiers.copying

    def finish_copy(self, version: int) -> None:
        """Block until this worker's share is copied: then the state may change. Reports what went wrong."""
        self._saver.finish_copy(version)

    def save(self, version: int, lineage: int, describe: Describe, *, uploads: bool = True) -> bool:
        """Save the state, which is that of a step boundary, unless that is done already; blocks until it is on disk,
        and gives whether it is. Raises InfrastructureError if it is not, the policy is to fail, and there is no agent
        to end the job."""
        self._saver.check()
        self.finish_copy(version)
        durable = False
        with self._saver.reported(version):
            snapshot = self._tiers.newest()
            if snapshot is None or not _is_saved(snapshot, version, lineage):
                state = self._state(version, lineage, describe, uploads)
                snapshot = self._saver.begin_snapshot_when_free(state, to_disk=True)
                self._tiers.finish_copy()
            durable = self._saver.wait(snapshot)
        self._saver.check()
        return durable

    def save_unless_saved(self, version: int, lineage: int, describe: Describe) -> None:
        """Save where no rank 0 is there to do it: several members may try, one after the other, and one write is
        enough. Blocks until that is on disk."""
        with self._folder_locked():
            if version not in [checkpoint.step for checkpoint in newest(self._tiers.folder)]:
                self.save(version, lineage, describe)

    def close(self) -> None:
        """Have this process's own writer finish, if it has one, and wait for it. Without an agent nothing can be saved
        after that."""
        self._saver.close()

    def _state(self, version: int, lineage: int, describe: Describe, uploads: bool) -> Captured:
        policy = self._saver.policy if uploads else replace(self._saver.policy, upload=None)
        return Captured(version, *self._capture(), {"lineage": lineage, "version": version, **describe()}, policy)

    def _capture(self) -> tuple[dict[str, Any], dict[Slice, Tensor]]:
        skeleton, tensors = self._registry.capture()
        return skeleton, {slice_of(name, tensor): tensor for name, tensor in tensors.items()}

    def _last_saved(self, lineage: int, from_step: int) -> tuple[LastSaved, LastSaved]:
        """What was last saved to disk, and to memory, in this lineage, which began at `from_step`."""
        began, snapshot = LastSaved(from_step), self._tiers.newest()
        if snapshot is None or snapshot.control.lineage != lineage:
            return began, began
        control = snapshot.control
        on_disk = LastSaved(control.disk_version, control.disk_began_at)
        return max(began, on_disk), max(began, LastSaved(control.version, control.began_at))

    # ---- restoring

    def restorable(self) -> dict[int, int]:
        """Versions that could be restored, newest first, and their lineages; without those found corrupt. If there are
        none here, the newest in object storage is fetched. Raises InfrastructureError if that fails."""
        found = self._tiers.stored()
        if not found and self._saver.policy.upload is not None:
            with self._folder_locked():
                self._tiers.fetch(self._saver.policy.upload.url)
            found = self._tiers.stored()
        restorable: dict[int, int] = {}
        for stored in found:
            lineage = int(stored.meta.get("lineage", 0))
            restorable[stored.version] = max(lineage, restorable.get(stored.version, lineage))
        first = self._inherited.version if self._inherited is not None else None
        return restorable if first is None else {**restorable, first: 0}

    def restore(self, version: int) -> tuple[str, str]:
        """Overwrite the whole state with a checkpoint's; return the hash of what it holds, and of what is held then.
        Raises CheckpointCorrupt; it is not offered again then."""
        if self._inherited is not None and version == self._inherited.version:
            return self._inherited.restore()
        self._tiers.tell_passed_over()
        loaded = self._tiers.load(version)
        ours = {NONFINITE: BEGIN} if NONFINITE in self._registry.parts else {}
        return self._registry.restore({**ours, **loaded.skeleton}, loaded.tensors)  # older checkpoints are without

    def prepare_step_0(self) -> None:
        """Prepare the state of step 0, because nobody has any: take the weights of another run if this one begins with
        them. Report the checkpoints here that could not be used."""
        self._tiers.tell_passed_over()
        if self._inherited is not None:
            self._inherited.prepare_step_0()

    @contextmanager
    def _folder_locked(self) -> Iterator[None]:
        self._tiers.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._tiers.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)  # and with it goes the lock


def make_saver(
    config: CheckpointConfig, run_dir: Path, registry: Registry, report: Report, inherited: Inherited | None = None
) -> RunSaver:
    """The saver of a worker: with the agent's shared memory and writer, or without an agent those of rank 0 itself."""
    folder = run_dir / "checkpoints"
    own_name = Path(os.path.abspath(run_dir)).name
    if config.nvme_path is not None:
        _lead_elsewhere(folder, Path(config.nvme_path).expanduser().absolute() / own_name)
    base = config.upload_url
    several = bool(node_of(os.environ.get(variables.MEMBER, "")))
    name = os.environ[variables.RUN_ID] if several else own_name  # the same on all nodes
    policy = policy_of(config, None if base is None else f"{base.rstrip('/')}/{name}")
    handed = os.environ.pop(variables.SNAPSHOTS, None)
    if handed is not None:
        *descriptors, wake = shared_frames.from_text(handed)
        frames, own = Frames(descriptors, wake, await_ledger=True), None
        for descriptor in descriptors:
            os.close(descriptor)
    elif os.environ.get("RANK", "0") == "0":
        report = _printing(report)
        own = OwnWriter(folder, report, file_lock.take(run_dir / "writer.lock", busy(run_dir)))
        frames = own.frames
    else:
        frames, own = Frames([]), None
    return RunSaver(Saver(Tiers(frames, folder, own, report), config, policy, report, own), registry, inherited)


def _is_saved(snapshot: Snapshot, version: int, lineage: int) -> bool:
    """Whether this snapshot is of that state, and is on disk or on its way there."""
    control = snapshot.control
    asked = (control.version, control.lineage, bool(control.to_disk)) == (version, lineage, True)
    return asked and snapshot.outcome != SnapshotOutcome.FAILED


def _printing(report: Report) -> Report:
    """Failures are printed as well: there is no agent to do it."""

    def told(event: str, fields: dict[str, Any]) -> None:
        print_alarm(event, fields)
        report(event, fields)

    return told


def _lead_elsewhere(folder: Path, target: Path) -> None:
    """Let the run's checkpoints be in another place. Raises ConfigError if there are some already."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(target)
    except FileExistsError:
        if folder.resolve() != target.resolve():
            raise ConfigError(
                f"checkpoint.nvme_path leads to {target}, but this run has checkpoints in {folder.resolve()}; move "
                "them there, or leave checkpoint.nvme_path out."
            ) from None
    except OSError as error:
        raise ConfigError(f"checkpoint.nvme_path: {target} cannot be used: {error.strerror}.") from error
