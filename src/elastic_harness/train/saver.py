"""When this member saves the run's state, and how it gets it back: the training side of the tiers.

On each node the first worker (alone on its machine, that is rank 0) decides when a snapshot is due and begins it; all
workers there copy their share while they compute the next step, and nobody applies that step before its share is
copied.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from elastic_harness import file_lock
from elastic_harness.checkpoint.interval import LastSaved, Timing
from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.manifest import newest
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.policy import Policy, policy_of
from elastic_harness.checkpoint.snapshot import Slots, Snapshot, SnapshotOutcome
from elastic_harness.checkpoint.tensors import slice_of
from elastic_harness.checkpoint.tiers import POLL_S, Report, Tiers
from elastic_harness.config import CheckpointConfig
from elastic_harness.contract import memory_slots, variables
from elastic_harness.contract.checkpoint_event import ALARMING
from elastic_harness.errors import ConfigError, HarnessError, InfrastructureError
from elastic_harness.membership.types import node_of
from elastic_harness.train.inherited import Inherited
from elastic_harness.train.nonfinite import BEGIN
from elastic_harness.train.nonfinite import NAME as NONFINITE
from elastic_harness.train.standalone import busy
from elastic_harness.train.state import Registry

Describe = Callable[[], dict[str, Any]]


class Saver:
    """`report(event, fields)` tells what happened. `own`: the writer, if there is no agent that has one. `inherited`:
    the state of the run that this one began from."""

    def __init__(
        self,
        tiers: Tiers,
        registry: Registry,
        config: CheckpointConfig,
        policy: Policy,
        report: Report,
        own: OwnWriter | None = None,
        inherited: Inherited | None = None,
    ) -> None:
        self._tiers = tiers
        self._registry = registry
        self._config = config
        self._policy = policy
        self._report = report
        self._own = own
        self._inherited = inherited
        self._timing = Timing(config)

    # ---- saving

    def save_if_due(
        self, version: int, lineage: int, from_step: int, world: int, describe: Describe, *, uploads: bool = True
    ) -> None:
        """As the first worker: begin a snapshot if one is due and a slot is free. `from_step`: where this lineage
        began. `world`: how many workers copy a share. `uploads`: whether it may go to object storage. Must be followed
        by `join` before the state changes. Does not block."""
        self._check()
        if "auto" in (self._config.checkpoint_interval, self._config.memory_snapshot_interval):
            self._timing.stepped(writing=self._tiers.busy())
        on_disk, in_memory = self._last_saved(lineage, from_step)
        to_disk = self._timing.is_due(version, on_disk, to_disk=True)
        if not to_disk and not self._timing.is_due(version, in_memory, to_disk=False):
            return
        shares = 1 if self._own is not None else world  # no other process has our memory
        with self._reported(version):
            begun = self._begin(version, lineage, describe, shares=shares, to_disk=to_disk, uploads=uploads)
            if begun is not None:
                self._timing.saved(to_disk=to_disk)

    def follow(self, version: int, rank: int, world: int) -> None:
        """As another worker: start copying this one's share if the first has begun a snapshot of this version. Costs
        microseconds if not. Does not block."""
        if rank == 0:
            return
        awaited = self._tiers.awaited(version, world)
        if awaited is not None:
            with self._reported(version):
                self._tiers.follow(awaited, self._capture()[1], rank)

    def failed(self) -> None:
        """Note that a worker was lost: it counts for intervals that follow the failure rate."""
        self._timing.failures += 1

    @property
    def alone(self) -> bool:
        """Whether this process has a writer of its own, so that nobody else saves the run."""
        return self._own is not None

    @property
    def copying(self) -> bool:
        return self._tiers.copying

    def join(self, version: int) -> None:
        """Block until the state may change."""
        with self._reported(version):
            self._tiers.join()

    def save(self, version: int, lineage: int, describe: Describe, *, uploads: bool = True) -> bool:
        """Save the state, which is that of a step boundary, unless that is done already; blocks until it is on disk,
        and gives whether it is."""
        self._check()
        self.join(version)
        snapshot, durable, wanted = self._tiers.newest(), False, (version, lineage, True)
        with self._reported(version):
            if snapshot is None or (snapshot.version, snapshot.control.lineage, snapshot.control.to_disk) != wanted:
                begin = partial(self._begin, version, lineage, describe, shares=1, to_disk=True, uploads=uploads)
                while (snapshot := begin()) is None:
                    time.sleep(POLL_S)
                self._tiers.join()
            durable = self._tiers.wait(snapshot) == SnapshotOutcome.DURABLE
        return durable

    def save_unless_saved(self, version: int, lineage: int, describe: Describe) -> None:
        """Save where no rank 0 is there to do it: several members may try, one after the other, and one write is
        enough. Blocks until that is on disk."""
        with self._folder_locked():
            if version not in [checkpoint.step for checkpoint in newest(self._tiers.folder)]:
                self.save(version, lineage, describe)

    def _check(self) -> None:
        if self._own is not None:
            self._own.check()

    def wait(self) -> None:
        """Let go of the tiers: a writer of our own finishes first, and ends."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def _begin(
        self, version: int, lineage: int, describe: Describe, *, shares: int, to_disk: bool, uploads: bool
    ) -> Snapshot | None:
        skeleton, tensors = self._capture()
        meta = {"lineage": lineage, "version": version, **describe()}
        policy = self._policy if uploads else replace(self._policy, upload=None)
        return self._tiers.begin(version, skeleton, tensors, meta, policy, shares=shares, to_disk=to_disk)

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

    @contextmanager
    def _reported(self, version: int) -> Iterator[None]:
        """What goes wrong in saving is told, and training goes on; unless the policy is to fail: then an agent ends the
        job, or, where there is none, this raises."""
        try:
            yield
        except (HarnessError, OSError, RuntimeError) as error:
            failure = self._policy.failure(version, error)
            self._report("checkpoint_failed", failure)
            if failure["fatal"] and self._own is not None:
                raise InfrastructureError(failure["error"]) from error

    # ---- restoring

    def restorable(self) -> dict[int, int]:
        """Versions that could be restored, newest first, and their lineages; without those found corrupt. If there are
        none here, the newest in object storage is fetched. Raises InfrastructureError if that fails."""
        found = self._tiers.stored()
        if not found and self._policy.upload is not None:
            with self._folder_locked():
                self._tiers.fetch(self._policy.upload.url)
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

    def begin(self) -> None:
        """Prepare the state of step 0, where nobody has any; tell of what is here and could not be used."""
        self._tiers.tell_passed_over()
        if self._inherited is not None:
            self._inherited.begin()

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
) -> Saver:
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
        *descriptors, wake = memory_slots.from_text(handed)
        slots, own = Slots(descriptors, wake), None
        for descriptor in descriptors:
            os.close(descriptor)
    elif os.environ.get("RANK", "0") == "0":
        report = _printing(report)
        own = OwnWriter(folder, report, file_lock.take(run_dir / "writer.lock", busy(run_dir)))
        slots = own.slots
    else:
        slots, own = Slots([]), None
    return Saver(Tiers(slots, folder, own, report), registry, config, policy, report, own, inherited)


def _printing(report: Report) -> Report:
    """Failures are printed as well: there is no agent to do it."""

    def told(event: str, fields: dict[str, Any]) -> None:
        if event in ALARMING:
            print(f"elastic-harness: {fields.get('error')}", file=sys.stderr, flush=True)
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
