"""The values that membership agrees on. Plain data: they travel as JSON between agent and worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from elastic_harness.omissions import Entry
from elastic_harness.shape import UNTOLD

LaneRanges = tuple[tuple[int, int], ...]
"""Half-open ranges of lanes, ascending and disjoint."""
Replica = tuple[str, ...]
"""A row: the members that hold the whole state together. The i-th one holds shard i."""


def node_of(member: str) -> str:
    """Return the node that a member runs on: the part of its id before the slash. In a run on one machine it is ""."""
    return member.rpartition("/")[0]


SourceKind = Literal["keep", "forward", "replay", "state", "init", "restore"]


@dataclass(frozen=True)
class Generation:
    """An agreed membership. If it is urgent, members abort at once what they do. Otherwise the change happens at a step
    boundary, on which the members of the previous generation agree among themselves. With one shard it says nothing of
    shards and rows: each member holds the whole state, and is a row of its own."""

    number: int
    members: tuple[str, ...]  # in rank order
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
        """The replicas. With one shard each member is one."""
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

    The member looks for checkpoints when its version is -1, and always if there are several shards. `sealed`: the
    member holds the record of step `version` too. It may have told the others so, and some of them may have committed
    that step since. `begun_for`: the generation in which step `version` was begun last, as far as the member knows, and
    for how many replicas; (0, 0): it was not begun, or its batch does not follow them.
    """

    generation: int
    version: int  # committed steps; -1: no state, or none that is verified
    record: int | None = None  # the step whose reduced gradient the member still holds
    lanes: LaneRanges = ()  # finished lanes of step `version`
    checkpoints: tuple[int, ...] = ()  # versions that the member could restore, newest first
    verified: bool = False  # the member's canary hash was compared before
    lineages: tuple[int, ...] = ()  # of the checkpoints, if known
    lineage: int = -1  # in which the member reached its state; -1: not known
    shard: int = field(default=0, metadata=UNTOLD)  # which one the state is
    sealed: bool = field(default=False, metadata=UNTOLD)
    begun_for: tuple[int, int] = field(default=(0, 0), metadata=UNTOLD)
    declined: tuple[tuple[int, int], ...] = field(default=(), metadata=UNTOLD)  # lanes and slots, as in Digest


@dataclass(frozen=True)
class Source:
    """Where a member's state at the agreed version comes from.

    keep: the member keeps its own. forward: it applies the record that it has sealed, and takes from `donor` what that
    needs of other shards. replay: it applies `donor`'s record. state: it takes the whole state from `donor`. init: it
    initialises itself. restore: it restores a checkpoint.
    """

    kind: SourceKind
    donor: str | None = None


@dataclass(frozen=True)
class Digest:
    """The leader's answer to all reports of a generation: the version to resume at, where each member's state comes
    from, which lanes of the running step each member has finished, and whose canary is due. `overdue` lists steps that
    are still to be done, and in which a member was ended because it did not finish its work within so many seconds.
    `omissions`: steps and slots that nobody computes. `workers`: for how many replicas the step at `version` is, if its
    batch follows them and somebody has begun it; 0: for as many as the generation has. `declined`: members, and the
    lanes for which each of them has not the memory, because of one slot in them."""

    generation: int
    version: int
    lineage: int
    from_step: int
    sources: dict[str, Source]
    lanes: dict[str, LaneRanges] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    overdue: tuple[tuple[int, float], ...] = ()
    omissions: tuple[Entry, ...] = field(default=(), metadata=UNTOLD)  # of the rollbacks so far
    workers: int = field(default=0, metadata=UNTOLD)
    declined: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata=UNTOLD)


@dataclass(frozen=True)
class Limits:
    """How many workers and nodes a job may have, and how long it waits for them.

    Below `min_workers` or `min_nodes` the job waits, alive. A first generation forms when `target` workers are ready,
    or after `join_timeout_s` with at least the minimum.
    """

    min_workers: int = 1  # counted in whole replicas
    max_workers: int = 8
    target: int = 1  # workers that the job should have when machines allow
    join_timeout_s: float = 600.0
    trouble_grace_s: float = 0.25  # after a broken link the leader waits so long: news of a death may be on its way
    min_nodes: int = 1
    shards: int = field(default=1, metadata=UNTOLD)  # workers that a replica takes

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
