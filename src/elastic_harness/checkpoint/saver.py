"""How any process saves: a worker of a run, or a script with a `CheckpointManager`. This module decides when a state is
due, begins its copy, and does what the policy says about a failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_harness.checkpoint.interval import LastSaved, Timing
from elastic_harness.checkpoint.memory.snapshot import Snapshot, SnapshotOutcome
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.policy import Policy
from elastic_harness.checkpoint.tiers import POLL_S, Captured, CheckpointTier, Report, Tiers
from elastic_harness.config import CheckpointConfig
from elastic_harness.errors import HarnessError, InfrastructureError


class Saver:
    """Saves for one process. `report(event, fields)` is told what went wrong. `own`: this process's writer, if no agent
    has one. A snapshot that awaits the ledger is reported when it is begun: that asks the agent to answer."""

    def __init__(
        self, tiers: Tiers, config: CheckpointConfig, policy: Policy, report: Report, own: OwnWriter | None = None
    ) -> None:
        self.tiers = tiers
        self.policy = policy
        self.timing = Timing(config)
        self._report = report
        self._own = own

    @property
    def alone(self) -> bool:
        """Whether this process has its own writer, and has not closed it."""
        return self._own is not None

    def check(self) -> None:
        """Raise InfrastructureError if a failure has to end the job and there is no agent to end it."""
        if self._own is not None:
            self._own.check()

    def due(self, version: int, on_disk: LastSaved, in_memory: LastSaved) -> CheckpointTier | None:
        """Return where the state after `version` steps is to be saved now. Call this once per step."""
        if self.timing.measures:
            self.timing.stepped(writing=self.tiers.busy())
        if self.timing.is_due(version, on_disk, to_disk=True):
            return CheckpointTier.NVME
        return CheckpointTier.MEMORY if self.timing.is_due(version, in_memory, to_disk=False) else None

    def begin_snapshot(self, state: Captured, *, to_disk: bool, shares: int = 1) -> Snapshot | None:
        """Start copying a state to shared memory, as `Tiers.begin_snapshot`; None if no place is free there now."""
        snapshot = self.tiers.begin_snapshot(state, shares=shares, to_disk=to_disk)
        if snapshot is not None:
            self.timing.saved(to_disk=to_disk)
            if snapshot.awaits_ledger:
                self._report("checkpoint_begun", {"attempt": snapshot.control.attempt})
        return snapshot

    def begin_snapshot_when_free(self, state: Captured, *, to_disk: bool) -> Snapshot:
        """Do as `begin_snapshot`; block while no place is free."""
        while (snapshot := self.begin_snapshot(state, to_disk=to_disk)) is None:
            time.sleep(POLL_S)
        return snapshot

    def finish_copy(self, version: int, *, needed: bool = False) -> None:
        """Block until this process's share is copied: then the state may change. `needed`: as for `reported`."""
        with self.reported(version, needed=needed):
            self.tiers.finish_copy()

    def wait(self, snapshot: Snapshot) -> bool:
        """Block until a snapshot is where it was to go, in memory or on disk, or until that is hopeless. Return whether
        it is there. If it is not, the reason has been reported."""
        if not snapshot.control.to_disk:
            return snapshot.complete
        outcome = self.tiers.wait(snapshot)
        if outcome == SnapshotOutcome.FAILED and self._own is not None:
            self._own.hear_why(snapshot.version)
        return outcome == SnapshotOutcome.DURABLE

    @contextmanager
    def reported(self, version: int, *, needed: bool = False) -> Iterator[None]:
        """Report an error of saving, and let training go on. With the policy `fail` an agent ends the job when it hears
        the report. Raise InfrastructureError if there is no agent to do that, or if the caller has to know
        (`needed`)."""
        try:
            yield
        except (HarnessError, OSError, RuntimeError) as error:
            failure = self.policy.failure(version, error)
            self._report("checkpoint_failed", failure)
            if needed or (failure["fatal"] and self._own is not None):
                raise InfrastructureError(failure["error"]) from error

    def close(self) -> None:
        """Have this process's own writer finish, and wait for it."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
