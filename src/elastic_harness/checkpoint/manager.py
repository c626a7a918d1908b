"""Checkpoints for any training script, with or without the rest of the harness.

    manager = CheckpointManager(CheckpointConfig(checkpoint_interval=500, memory_snapshot_interval=50, nvme_path="…"))
    state = manager.load_checkpoint()                      # the newest that is whole: memory → local disk → S3
    …
    if tier := manager.due(step):
        manager.save_checkpoint(CheckpointState(step=step, model_state=model.state_dict(), …), tier)

In a process group all ranks call the same methods in the same order, with the same steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from elastic_harness import file_lock
from elastic_harness.checkpoint import sharding
from elastic_harness.checkpoint.disk import local, parts
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.disk.parts import Part
from elastic_harness.checkpoint.interval import LastSaved
from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.memory import keeper, ring
from elastic_harness.checkpoint.memory.snapshot import Snapshot
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.packages import packages
from elastic_harness.checkpoint.peers import Peers, this_machine
from elastic_harness.checkpoint.policy import policy_of
from elastic_harness.checkpoint.ranks import Ranks
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.checkpoint.saver import Saver
from elastic_harness.checkpoint.state import STATES, CheckpointState
from elastic_harness.checkpoint.structure import decode, encode
from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.checkpoint.tiers import Captured, CheckpointTier, Loaded, Report, Stored, Tiers
from elastic_harness.config import CheckpointConfig
from elastic_harness.contract.checkpoint_event import print_alarm
from elastic_harness.errors import CheckpointCorrupt, ConfigError, InfrastructureError

DEFAULT_FOLDER = Path("checkpoints")
_META = ["epoch", "tokens", "generation", "world_size", "metrics", "config", "timestamp"]


class CheckpointManager:
    """Saves and loads `CheckpointState`s through shared memory, local disk and object storage. `report(event, fields)`
    is told what happens, in any thread; by default failures are printed.

    Memory: two copies of what this process saves. A separate process writes them to disk. When this process dies, the
    writer first brings the newest copy to disk. In a process group on several nodes each rank's snapshots are also
    copied to another node, and outlive the ranks. Use `with`, or call `close`. Collective in a process group. Raises
    ConfigError if another job uses the folder.
    """

    def __init__(self, config: CheckpointConfig | None = None, report: Report | None = None) -> None:
        self.config = config or CheckpointConfig()
        if self.config.each_epoch:
            raise ConfigError(
                "each_epoch is for a run of elastic_harness.start(), which knows its epochs; call save_checkpoint at "
                "the end of each epoch of yours."
            )
        self.folder = Path(self.config.nvme_path or DEFAULT_FOLDER).expanduser().absolute()
        self._tell = report or print_alarm
        self._ranks = Ranks()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._saves = 0
        self._asked = -1  # the step about which `should_checkpoint` was asked last
        self._last = {CheckpointTier.NVME: LastSaved(), CheckpointTier.MEMORY: LastSaved()}
        self._snapshot: Snapshot | None = None
        self._previous: Any = None
        self.preempted = False
        lock = self._lock()
        self._token = self._ranks.token()
        nodes = self._nodes()
        rank, links = self._ranks.rank, ring.links(nodes, self.config.peer_copies)
        if rank == 0 or (links and rank == nodes.index(nodes[rank])):
            parts.clean(self.folder)
        key = keeper.key_of(self.folder, nodes[rank])
        kept = keeper.find(key) if self.config.peer_copies else []
        copies = sum(to == rank for _, to in links)
        self._writer = OwnWriter(self.folder, self._tell, lock, keep=key if links else None, copies=copies)
        self._tiers = Tiers(self._writer.frames, self.folder, self._writer, self._tell)
        policy = policy_of(self.config, self.config.upload_url)
        self._saver = Saver(self._tiers, self.config, policy, self._tell, self._writer)
        self._peers = None
        if links or self._ranks.greatest(len(kept)):
            self._peers = Peers(self._ranks, nodes, links, kept, self._writer, self._tiers, self._tell)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(needed=kind is not None)

    def close(self) -> None:
        """Wait until everything is copied, written and uploaded, and let go of it."""
        self._close(needed=False)

    def _close(self, *, needed: bool) -> None:
        with contextlib.suppress(BaseException):
            self._join()
        if self._peers is not None:
            self._peers.close(needed=needed)
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
        self._writer.close(keep=needed)

    # ---- saving

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let copies of this optimizer's parameters and state run beside forward and backward. `save_checkpoint` then
        returns at once, and `optimizer.step()` waits for the copy. All other state is copied before `save_checkpoint`
        returns."""
        optimizer.register_step_pre_hook(lambda *_: self._join())
        self._optimizers.append(optimizer)

    def due(self, step: int) -> CheckpointTier | None:
        """Return where the state after `step` steps should be saved now, or None. The intervals say so. If the process
        is about to be preempted, it is local disk.

        An interval of N steps asks when a multiple of N was passed since it last asked. It does not ask at step 0, at
        the step that was loaded, or at one that was saved. Call this once per step. In a process group call it on all
        ranks, because with intervals that are "auto" or a time, or `watch_preemption` it is collective.
        """
        tier = self._saver.due(step, self._last[CheckpointTier.NVME], self._last[CheckpointTier.MEMORY])
        if self._saver.timing.by_clock:
            tier = self._as_rank_0(tier)
        if self._previous is not None:
            self.preempted = bool(self._ranks.greatest(int(self.preempted)))
        if self.preempted:
            return CheckpointTier.NVME
        if tier is not None:
            self._note(step, on_disk=tier == CheckpointTier.NVME)  # so that it is asked for only once
        return tier

    def save_checkpoint(
        self, state: CheckpointState, tier: CheckpointTier = CheckpointTier.NVME, *, wait: bool = False
    ) -> None:
        """Copy a state to shared memory. The writer takes it from there to local disk (tier NVME), and to object
        storage as well (tier S3).

        Return when the state is copied (see `attach`). With `wait` return when it is on disk and, in a process group,
        all of its parts are. Block while two earlier states still wait for the disk, and while the last one is still on
        its way to another node. Collective in a process group. A failure is reported. Raises ConfigError for state that
        cannot be stored. Raises InfrastructureError for a failure if `wait` is given, or if async_save_policy is fail,
        also for an earlier state.
        """
        self._saver.check()
        policy = self._saver.policy
        if tier == CheckpointTier.S3:
            if policy.upload is None:
                raise ConfigError("tier is S3, but s3_bucket is not set; name a bucket in the CheckpointConfig.")
            policy = policy.uploading_next()
        began = time.perf_counter()
        self._join()
        if self._peers is not None:
            self._peers.finish_copy()
        tensors: dict[str, Tensor] = {}
        skeleton = {name: encode(getattr(state, name), name, tensors) for name in STATES}
        meta = {"lineage": 0, **{name: getattr(state, name) for name in _META}, "packages": packages()}
        meta["timestamp"] = time.time()
        if self._ranks.world > 1:
            meta["world_size"] = self._ranks.world
        mine = sharding.to_write(tensors, self._ranks.rank, self._ranks.world)
        owned = self._of_optimizers()
        if owned:
            mine = {of: t if _storage(t) in owned else t.detach().clone() for of, t in mine.items()}
        part = None
        if self._ranks.world > 1:
            part = Part(self._ranks.rank, self._ranks.world, f"{self._token:016x}-{self._saves}")
        self._saves += 1
        to_disk = tier != CheckpointTier.MEMORY
        whole = skeleton if self._ranks.rank == 0 else {}
        self._snapshot = None
        with self._saver.reported(state.step, needed=wait or self._peers is not None):  # peers would wait for this rank
            captured = Captured(state.step, whole, mine, meta, policy, part)
            snapshot = self._saver.begin_snapshot_when_free(captured, to_disk=to_disk)
            if not owned:
                self._tiers.finish_copy()
            self._snapshot = snapshot
        self._note(state.step, on_disk=to_disk)
        if self._snapshot is not None:
            if self._peers is not None:
                self._peers.begin_copy(self._snapshot)
            stall_ms = 1e3 * (time.perf_counter() - began)
            self._tell("snapshot_taken", {"step": state.step, "tier": tier.value, "stall_ms": stall_ms})
        if wait:
            self.wait()

    def should_checkpoint(self, step: int, tier: CheckpointTier = CheckpointTier.NVME) -> bool:
        """Return whether the state after `step` steps should be saved to this tier now: `due`, asked for one tier. It
        may be asked again, until that step is saved. To object storage goes what goes to disk, if there is a bucket."""
        if tier == CheckpointTier.S3 and self._saver.policy.upload is None:
            return False
        if self._previous is not None:
            self.preempted = bool(self._ranks.greatest(int(self.preempted)))
        to_disk, timing = tier != CheckpointTier.MEMORY, self._saver.timing
        if timing.measures and step != self._asked:
            timing.stepped(writing=self._tiers.busy())
        self._asked = step
        last = self._last[CheckpointTier.NVME if to_disk else CheckpointTier.MEMORY]
        due = timing.is_due(step, last, to_disk=to_disk) or (self.preempted and to_disk)
        return self._ranks.greatest(int(due and self._ranks.rank == 0)) == 1 if timing.by_clock else due

    def wait_for_pending_saves(self) -> None:
        """Do as `wait`."""
        self.wait()

    def clear_memory_snapshots(self) -> None:
        """Offer this process's snapshots in memory no more, except what is still on its way to disk. The memory stays
        reserved for the next snapshots; `close` gives it back."""
        self._join()
        self._tiers.clear_memory()

    def wait(self) -> None:
        """Block until the last state is copied to other nodes and, if it was to go there, is on disk. Raises
        InfrastructureError if that failed. Collective in a process group."""
        done, failed = True, None
        try:
            self._join(needed=True)
            if self._peers is not None:
                self._peers.finish_copy()
            if self._snapshot is not None:
                done = self._saver.wait(self._snapshot)
            self._saver.check()
        except InfrastructureError as error:
            failed = error
        self._ranks.barrier()
        if failed is not None:
            raise failed
        if not done:
            raise InfrastructureError(
                f"The checkpoint could not be written to {self.folder}; what went wrong was reported. Free space there."
            )

    def _join(self, *, needed: bool = False) -> None:
        """Block until the state may change."""
        self._saver.finish_copy(-1 if self._snapshot is None else self._snapshot.version, needed=needed)

    def watch_preemption(self) -> None:
        """Set `preempted` on SIGTERM. `due` then asks for a checkpoint; save it with `wait=True` and leave within the
        grace period. In any case the newest snapshot in memory is brought to disk when this process ends. Only from the
        main thread."""

        def asked(number: int, frame: FrameType | None) -> None:
            self.preempted = True
            if callable(self._previous):
                self._previous(number, frame)

        self._previous = signal.signal(signal.SIGTERM, asked)

    # ---- loading

    def stored(self) -> list[Stored]:
        """Return what could be loaded from memory or disk, the newest first."""
        found = self._tiers.stored()
        return found if self._ranks.world == 1 else [s for s in found if s.tier == CheckpointTier.NVME]

    def list_checkpoints(self) -> list[Stored]:
        """Do as `stored`."""
        return self.stored()

    def load_checkpoint(
        self,
        step: int | None = None,
        into: CheckpointState | None = None,
        *,
        tier: CheckpointTier | str | None = None,
    ) -> CheckpointState | None:
        """Return the newest complete state, or that of a step; None if there is none. A damaged piece is taken from
        another tier. If no tier has it, the checkpoint is set aside, and the next older one is loaded.

        Tensors are whole and on the CPU. With `into`, whose structure must be the same, its tensors are filled in
        place, wherever they are and however they are sharded, and are returned. Collective in a process group: all
        ranks load the same step. Raises ConfigError if there is no checkpoint of the step, or if `into` differs.

        tier: look there only, "memory", "nvme" or "s3". From s3 the newest checkpoint there is brought to the local
        disk first, if that has not the same step, even if it has newer ones. Raises ConfigError for memory in a process
        group, where ranks agree on disk or on copies, and for s3 without a bucket or with a step.
        """
        self._join()
        if tier is not None:
            return self._load_from(CheckpointTier(tier), step, into)
        if self._peers is not None:
            target = None if into is None else _Target(into)
            on_disk = self._agree(step)
            found = self._peers.load_newest(step, -1 if on_disk is None else on_disk, target.memory if target else None)
            if found is not None:
                return self._state(*found, target)
        if self._ranks.rank == 0:
            self._tiers.tell_passed_over()
        fetched = False
        while True:
            version = self._agree(step)
            if version is None and not fetched:
                self._fetch()
                fetched = True
                continue
            if version is None:
                if step is not None:
                    raise ConfigError(f"There is no whole checkpoint of step {step} in {self.folder}.")
                return None
            state = None
            with contextlib.suppress(CheckpointCorrupt):
                state = self._load(version, into)
            if self._ranks.all(state is not None):
                return state
            self._set_aside(version)

    def _load_from(
        self, tier: CheckpointTier, step: int | None, into: CheckpointState | None
    ) -> CheckpointState | None:
        """Return the newest state in one tier, or that of a step."""
        if tier == CheckpointTier.MEMORY and self._ranks.world > 1:
            raise ConfigError("tier is memory, but ranks of a process group cannot load from there; leave tier= out.")
        if tier == CheckpointTier.S3:
            step = self._pull(step)
        version: int | None
        if tier == CheckpointTier.MEMORY:
            found = [s.version for s in self.stored() if s.tier == tier and step in (None, s.version)]
            version = found[0] if found else None
        else:
            here = [c.step for c in newest(self.folder) if step in (None, c.step)]
            version = self._ranks.least(max(here, default=-1))
            version = None if version < 0 else version
        if version is None:
            if step is not None:
                raise ConfigError(f"There is no checkpoint of step {step} in the tier {tier.value}.")
            return None
        target = None if into is None else _Target(into)
        from_memory = tier == CheckpointTier.MEMORY
        loaded = self._tiers.load(version, target.memory if target else None, from_memory=from_memory)
        return self._state(version, loaded, target)

    def _pull(self, step: int | None) -> int:
        """Bring the newest checkpoint of object storage to disk, and return its step. Collective."""
        upload, pulled = self._saver.policy.upload, [-1]
        if upload is None or step is not None:
            raise ConfigError(
                "tier is s3, but s3_bucket is not set; name a bucket in the CheckpointConfig."
                if upload is None
                else f"tier is s3 and step {step}; leave step out, or bring it with `elastic-harness checkpoint pull`."
            )

        def pull() -> None:
            here = {checkpoint.path.name: checkpoint for checkpoint in newest(self.folder)}
            there = transfer.names(upload.url)[:1]
            checkpoint = here.get(there[0]) if there else None
            checkpoint = checkpoint or transfer.pull_newest(upload.url, self.folder)
            pulled[0] = -1 if checkpoint is None else checkpoint.step

        self._ranks.on_rank_0(pull)
        return self._ranks.greatest(pulled[0])

    def _load(self, version: int, into: CheckpointState | None) -> CheckpointState:
        target = None if into is None else _Target(into)
        loaded = self._tiers.load(version, target.memory if target else None, from_memory=self._ranks.world == 1)
        return self._state(version, loaded, target)

    def _state(self, version: int, loaded: Loaded, target: _Target | None) -> CheckpointState:
        skeleton, tensors, meta, tier, _ = loaded
        if target is not None:
            tensors = target.filled()
        states = {name: decode(skeleton[name], tensors, layouts=target is None) for name in STATES}
        others = {name: meta[name] for name in _META if name in meta}
        self._note(version, on_disk=True)
        path = str(self.folder / f"step-{version:08d}") if tier == CheckpointTier.NVME else None
        return CheckpointState(
            version, **states, **others, tier=tier, path=path, packages=dict(meta.get("packages", {}))
        )

    def _note(self, version: int, *, on_disk: bool) -> None:
        """Note that this version need not be saved again."""
        for tier in (CheckpointTier.MEMORY, CheckpointTier.NVME) if on_disk else (CheckpointTier.MEMORY,):
            self._last[tier] = LastSaved(version, time.monotonic())

    def _fetch(self) -> None:
        """Fetch a checkpoint from object storage, if there is none here. Raises on all ranks if rank 0 cannot."""
        upload = self._saver.policy.upload
        if upload is not None:
            self._ranks.on_rank_0(lambda: self._tiers.fetch(upload.url))

    def _agree(self, step: int | None) -> int | None:
        """Return the newest version that all ranks could load."""
        candidates = [s.version for s in self.stored() if step is None or s.version == step]
        while True:
            newest_here = candidates[0] if candidates else -1
            lowest, highest = self._ranks.least(newest_here), self._ranks.greatest(newest_here)
            if lowest == highest:
                return lowest if lowest >= 0 else None
            candidates = [version for version in candidates if version <= lowest]

    def _set_aside(self, version: int) -> None:
        """Set a version aside that one rank could not load, so that it is not offered again."""
        if self._ranks.world > 1 and self._ranks.rank == 0:
            for checkpoint in newest(self.folder):
                if checkpoint.step == version and local.quarantine(checkpoint) is None:
                    local.set_aside(checkpoint.path, "refused")
        self._ranks.barrier()

    # ---- the rest

    def _nodes(self) -> list[str]:
        """Return every rank's node. Collective; it returns when the writers of the last job's ranks are done."""
        name = self.config.node_name or this_machine()
        return [said.decode() for said in self._ranks.gather(name.encode())]

    def _lock(self) -> int:
        """Take this rank's place in the folder. Rank 0 waits for the writers of all ranks of an earlier job."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"nvme_path: {self.folder} cannot be made: {error.strerror}.") from error
        busy = (
            f"{self.folder} is in use by another job, process {{holder}}; give this one another nvme_path, or end that."
        )
        if self._ranks.rank == 0:
            for path in self.folder.glob(".writer-*.lock"):
                if path.name != ".writer-0.lock" and int(path.name[8:-5]) >= self._ranks.world:
                    os.close(file_lock.take(path, busy))
                    path.unlink(missing_ok=True)
        return file_lock.take(self.folder / f".writer-{self._ranks.rank}.lock", busy)

    def _of_optimizers(self) -> set[int]:
        """Return the addresses of the memory that only `optimizer.step` changes, if copies may run beside training."""
        found = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
                    found |= {_storage(t) for t in tensors if isinstance(t, Tensor)}
        return found

    def _as_rank_0(self, tier: CheckpointTier | None) -> CheckpointTier | None:
        """Return for all ranks what rank 0 has decided, by its clock. Collective."""
        choices = (None, CheckpointTier.MEMORY, CheckpointTier.NVME)
        return choices[self._ranks.greatest(choices.index(tier) if self._ranks.rank == 0 else 0)]


class _Target:
    """A state whose tensors are filled in place, on whatever device and however sharded."""

    def __init__(self, state: CheckpointState) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name in STATES:
            encode(getattr(state, name), name, self._tensors)
        self._parts = sharding.targets(self._tensors)
        self._memory: dict[Slice, Tensor] = {}
        for of, part in self._parts.items():
            here = part.device.type == "cpu" and part.is_contiguous()
            self._memory[of] = part if here else torch.empty(part.shape, dtype=part.dtype)

    def memory(self, stored: set[str]) -> dict[Slice, memoryview]:
        """Return the memory to fill. Raises ConfigError if the stored tensors are others."""
        if stored != set(self._tensors):
            missing, unknown = sorted(set(self._tensors) - stored), sorted(stored - set(self._tensors))
            raise ConfigError(
                f"The checkpoint is of another state: it lacks {missing[:5] or 'nothing'} and has "
                f"{unknown[:5] or 'nothing'} that `into` does not have. Load without `into`, or build the same state."
            )
        return {of: content_of(tensor) for of, tensor in self._memory.items()}

    def filled(self) -> dict[str, Tensor]:
        """Return the state's own tensors, filled with what was loaded."""
        with torch.no_grad():
            for of, part in self._parts.items():
                if self._memory[of] is not part:
                    part.copy_(self._memory[of])
        return self._tensors


def _storage(tensor: Tensor) -> int:
    """Return the address of the memory that this tensor is a part of."""
    held = tensor.to_local() if sharding.is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return int(held.untyped_storage().data_ptr())
