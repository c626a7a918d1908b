"""The values that the loop and recovery pass to each other."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import cached_property

from elastic_harness.comm.exchange import Exchange
from elastic_harness.comm.transport import Transport
from elastic_harness.membership.types import Digest, Generation, node_of
from elastic_harness.train.apply import Metrics, Record
from elastic_harness.train.gate import GateVerdict
from elastic_harness.train.measures import Measured
from elastic_harness.train.partials import Partials
from elastic_harness.train.placing import Paces


@dataclass(frozen=True)
class Formed:
    """A generation this member takes part in: agreed, connected, reconciled."""

    generation: Generation
    digest: Digest
    rank: int
    transport: Transport | None  # None: alone

    @property
    def world(self) -> int:
        return len(self.generation.members)

    @cached_property
    def on_node(self) -> tuple[int, int]:
        """This member's place among those of its node, and how many they are."""
        members = self.generation.members
        node = node_of(members[self.rank])
        there = [rank for rank, member in enumerate(members) if node_of(member) == node]
        return there.index(self.rank), len(there)

    @property
    def speaks(self) -> bool:
        """Whether this member tells its agent what is committed, and saves: the first one of each node."""
        return self.on_node[0] == 0

    def unverified(self, step: int) -> tuple[int, ...]:
        """Ranks whose canary is due in this step: only in a generation's first."""
        if step != self.digest.version or self.world == 1:
            return ()
        return tuple(self.generation.members.index(m) for m in self.digest.unverified)

    def begins(self, step: int) -> bool:
        """Whether all members begin here: nobody has done the step before this one."""
        return step == self.digest.version and all(
            self.digest.sources[m].kind not in ("keep", "replay") for m in self.generation.members
        )

    def late(self, step: int) -> tuple[int, ...]:
        """Ranks that receive the state before they can begin this step, while others have it."""
        if step != self.digest.version or self.begins(step):
            return ()
        kinds = [self.digest.sources[m].kind for m in self.generation.members]
        return tuple(rank for rank, kind in enumerate(kinds) if kind == "state")


@dataclass(frozen=True)
class Progress:
    """How far this worker is. version: committed steps, -1 without state. partials: finished lanes of the running
    step. record: of the last committed step, kept until everyone has it. verified: the canary was compared. lineage: in
    which the version was reached. begun_for: as a `Report` has it."""

    version: int = -1
    lineage: int = -1
    partials: Partials | None = None
    begun_for: tuple[int, int] = (0, 0)
    record: Record | None = None
    metrics: Metrics | None = None
    formed: Formed | None = None
    verified: bool = False
    exchange: Exchange | None = None  # of the last commit: owns the record's vector, and may still be sending
    serving: threading.Thread | None = None  # sends state that must not change: to be joined before the next commit
    measured: Measured = field(default_factory=Measured)  # of this version
    verdict: GateVerdict | None = None  # of the last commit, as long as it was not settled
    certain: int = -1  # the newest version that an audit of everybody has confirmed, as far as this member knows
    audited: int = 0  # the number of the newest request to compare all members that was met
    paces: Paces = field(default_factory=Paces)  # of the members, since this generation began
    announced: int = 0  # newest generation number this worker has reacted to
    committed_at: float = 0.0
    # Lanes of the running step, and the slot for which memory did not suffice.
    declined: tuple[tuple[int, int], ...] = ()
    declines: int = 0  # slots that it declined without having finished one in between
    declined_after: int = -1  # so many slots that it had finished, ever

    @property
    def ended(self) -> bool:
        """Whether the last committed step was the run's last one because the script asked for that."""
        return self.record is not None and self.record.ends

    def dropped(self) -> Progress:
        """The same worker without the lanes it had finished."""
        return replace(self, partials=None)

    def at(self, version: int, *, record: Record | None, metrics: Metrics | None) -> Progress:
        """The same worker at another version, with nothing of the next step done."""
        fresh = replace(self, partials=None, begun_for=(0, 0), verdict=None, declined=(), measured=Measured())
        return replace(fresh, version=version, record=record, metrics=metrics)

    def declining(self, lane: int, slot: int, finished: int) -> Progress:
        """The same worker, which leaves a lane to another one. finished: slots that it has finished, ever."""
        declines = 1 + (self.declines if finished == self.declined_after else 0)
        return replace(self, declined=(*self.declined, (lane, slot)), declines=declines, declined_after=finished)
