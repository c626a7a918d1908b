"""One state of the modelled cluster, and a violation of what must hold in it. Plain, hashable values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from elastic_harness.runs.ledger import LedgerLine, follow_lineages
from elastic_harness.train.heard import Heard

Contribution = tuple[int, int]
"""(step, lane): stands for that lane's gradient at that step."""
Gradient = tuple[Contribution, ...]
"""A reduced gradient is known by the contributions in it. A correct one holds every lane of its step once."""
Value = tuple[Gradient, ...]
"""Training state after v steps is known by the v gradients that were applied."""


class Grid(NamedTuple):
    """The members of a generation with several shards, as rows and columns."""

    rows: tuple[tuple[int, ...], ...]  # the members of each compute together
    columns: tuple[tuple[int, ...], ...]  # the members of each hold the same shard


class SimulatedWorker(NamedTuple):
    """One member.

    mode: idle (never told of a generation), wait (for a generation or a digest), repair (waits for what it takes from a
    donor), step, fin (committed the last step), over (dead, gone, or told that the job is done).
    """

    up: bool = True
    fenced: bool = False  # declared lost, but still running
    told: bool = False  # some generation has named it
    stop: bool = False  # asked to leave at a step boundary
    mode: str = "idle"
    gen: int = 0  # the generation that it exchanges in …
    members: tuple[int, ...] = ()  # … and the members of that
    heard: Heard = Heard()  # of generations
    digest: int = -1  # the newest one that it has heard of, numbered
    reacted: int = 0  # the newest generation that it has reacted to
    target: int = 0  # the generation that it reported for and waits for; 0: none
    successors: tuple[int, ...] = ()  # the members of `target`
    boundary: bool = True  # it waits at a step boundary, not after a failure
    lineage: int = 0
    from_step: int = 0
    version: int = -1
    value: Value = ()
    record: tuple[int, Gradient] | None = None
    lanes: Gradient = ()  # finished ones of step `version`
    todo: tuple[int, ...] = ()  # lanes that it has still to compute
    sent: bool = False  # its header and partial sums
    reduced: bool = False  # the blocks that it owns
    serve: tuple[tuple[int, str], ...] = ()  # members that take something from this one, and what
    expect: str = ""  # what it waits for, and from which donor
    verified: bool = False
    due: tuple[int, ...] = ()  # members whose canary is due in this step
    # with a batch that follows the workers only
    dealt_for: int = 0  # replicas that step `version` is for
    begun_for: tuple[int, int] = (0, 0)  # as it is reported
    told_for: int = 0  # as the digest has it, until the version is reached
    # with several shards only
    grid: Grid | None = None  # of `members`
    next_grid: Grid | None = None  # of `successors`
    shard: int = 0  # which one `value` is
    sealed: Gradient = ()  # the column's sum for step `version`, once the others were told that it is there


class Message(NamedTuple):
    """A message from worker to worker. kind: H(eader), P(artial sums for a block's owner), R(educed block), S(eal),
    replay, forward, state."""

    kind: str
    generation: int
    step: int
    source: int
    block: int
    body: tuple[object, ...]


class Faults(NamedTuple):
    """How often something may still go wrong, by kind."""

    crashes: int = 0
    joins: int = 0
    zombies: int = 0
    breaks: int = 0
    scales: tuple[int, ...] = ()
    stops: int = 0
    slows: int = 0


class World(NamedTuple):
    """The whole cluster at one moment. A message in `mail` has arrived, but its receiver may look at it at any later
    time: so messages are delayed."""

    leader: int  # the leader's state, numbered
    workers: tuple[SimulatedWorker, ...]
    mail: tuple[frozenset[Message], ...]  # by receiver
    down: tuple[tuple[tuple[object, ...], ...], ...]  # from the leader to each worker, first in first out
    up: tuple[tuple[int, ...], ...]  # events from each worker to the leader, numbered, first in first out
    links: frozenset[tuple[int, int, int]]  # broken ones: generation (-1: every one), member, member
    ledger: frozenset[tuple[int, int, int]]  # lineage, from_step and step of each line
    checkpoints: tuple[tuple[int, int], ...]  # version and lineage, newest first
    faults: Faults
    batches: frozenset[tuple[int, int, int]] = frozenset()  # lineage, step and for how many replicas it was committed


Move = tuple[object, ...]
"""An entry of a trace: the name of what happened, and the worker that it happened to."""


@dataclass(frozen=True)
class Violation(Exception):
    """An invariant does not hold. `kind` is a stable name, `detail` gives the facts."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def followed(ledger: frozenset[tuple[int, int, int]]) -> set[int]:
    """Return the steps that a ledger with these lines accounts for, by `ledger.follow_lineages`, as users are told."""
    lines = [_line(*line) for line in sorted(ledger)]
    return set(follow_lineages(lines))


def _line(lineage: int, from_step: int, step: int) -> LedgerLine:
    return LedgerLine(lineage, from_step, step, 0, 0, 0, 0, 0, 0, 0, (), (), (), 0.0)


@lru_cache(maxsize=256)
def canonical(version: int, lanes: int) -> Value:
    """Return the only right state after `version` steps."""
    return tuple(tuple((s, lane) for lane in range(lanes)) for s in range(version))
