"""The values that membership agrees on. Plain data: they travel as JSON between agent and worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from elastic_harness.shape import UNTOLD

LaneRanges = tuple[tuple[int, int], ...]
"""Half-open ranges of lanes, ascending and disjoint."""
Replica = tuple[str, ...]
"""A row: the members that hold the whole state together. The i-th one holds shard i."""


def node_of(member: str) -> str:
    """The node that a member runs on: what comes before the slash. Members of a run on one machine have none."""
    return member.rpartition("/")[0]


SourceKind = Literal["keep", "forward", "replay", "state", "init", "restore"]


@dataclass(frozen=True)
class Generation:
    """An agreed membership. `members` are in rank order; `urgent` means: abort what you do, now. Otherwise the
    change happens at a step boundary that the members of the previous generation agree on among themselves. With one
    shard nothing is said of shards and rows: each member holds the whole state, and is a row of its own."""

    number: int
    members: tuple[str, ...]
    urgent: bool
    reason: str
    shards: tuple[int, ...] = field(default=(), metadata=UNTOLD)  # the one that each member holds, in rank order
    replicas: tuple[Replica, ...] = field(default=(), metadata=UNTOLD)  # whole rows; others have no lanes

    @cached_property
    def member_set(self) -> frozenset[str]:
        return frozenset(self.members)

    @cached_property
    def shard_of(self) -> dict[str, int]:
        """The shard that each member holds."""
        return dict(zip(self.members, self.shards or (0,) * len(self.members), strict=True))

    @cached_property
    def rows(self) -> tuple[Replica, ...]:
        """The replicas, with one shard as well."""
        return self.replicas if self.shards else tuple((member,) for member in self.members)

    @cached_property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """The members that hold each shard, in rank order."""
        return tuple(
            tuple(member for member in self.members if self.shard_of[member] == shard)
            for shard in range(max(self.shards, default=0) + 1)
        )


@dataclass(frozen=True)
class Report:
    """How far one member is when a generation forms.

    version: committed steps, -1 without (verified) state. record: the step whose reduced gradient is still held,
    or None. lanes: finished lanes of step `version`. checkpoints: versions that could be restored, newest first
    (looked up when version is -1, and always if there are several shards). verified: this member's canary hash has
    already been compared. lineages: of the checkpoints, if known. lineage: in which the state was reached, -1 if that
    is not known. shard: which one the state is. sealed: the member holds the record of step `version` too, and has
    perhaps told the others so, of whom some may have committed that step since.
    """

    generation: int
    version: int
    record: int | None = None
    lanes: LaneRanges = ()
    checkpoints: tuple[int, ...] = ()
    verified: bool = False
    lineages: tuple[int, ...] = ()
    lineage: int = -1
    shard: int = field(default=0, metadata=UNTOLD)
    sealed: bool = field(default=False, metadata=UNTOLD)


@dataclass(frozen=True)
class Source:
    """Where a member's state at the agreed version comes from: it keeps its own, goes forward by the record that it has
    sealed (what that needs of other shards comes from `donor`), replays `donor`'s record, takes the whole state from
    `donor`, initialises itself, or restores a checkpoint."""

    kind: SourceKind
    donor: str | None = None


@dataclass(frozen=True)
class Digest:
    """What the leader concluded from all reports of a generation: the version to resume at, who takes state from
    whom, which lanes of the running step are already finished (and where), which members' canary is due. overdue: steps
    that are still to be done in which a member was ended, because it did not finish its work within so many seconds."""

    generation: int
    version: int
    lineage: int
    from_step: int
    sources: dict[str, Source]
    lanes: dict[str, LaneRanges] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    overdue: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Limits:
    """Policy. target: how many workers the job should have when machines allow. The job waits, alive, below
    `min_workers`, and below `min_nodes`. A first generation forms when `target` are ready, or after `join_timeout_s`
    with at least the minimum. A broken link without a death is waited out for `trouble_grace_s` in case the death is
    still on its way. A replica takes `shards` workers; the minimum counts those in whole replicas."""

    min_workers: int = 1
    max_workers: int = 8
    target: int = 1
    join_timeout_s: float = 600.0
    trouble_grace_s: float = 0.25
    min_nodes: int = 1
    shards: int = field(default=1, metadata=UNTOLD)

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.target <= self.max_workers:
            raise ValueError(
                f"need 1 <= min_workers <= target <= max_workers, got {self.min_workers}, {self.target}, "
                f"{self.max_workers}"
            )
        if not 1 <= self.shards <= self.least <= self.target:
            raise ValueError(
                f"need whole replicas of shards workers, at least {self.least} workers of them within the target, got "
                f"shards {self.shards}, target {self.target}"
            )

    @property
    def least(self) -> int:
        """The minimum of workers, in whole replicas."""
        return -(-self.min_workers // self.shards) * self.shards
