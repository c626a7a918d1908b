"""One state of the modelled cluster, and what may be wrong with it. Plain, hashable values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from elastic_harness.runs.ledger import LedgerLine, follow
from elastic_harness.train.heard import Heard

Contribution = tuple[int, int]
"""(step, lane): stands for that lane's gradient at that step."""
Gradient = tuple[Contribution, ...]
"""A reduced gradient is known by what was summed into it; a correct one holds every lane of its step once."""
Value = tuple[Gradient, ...]
"""Training state after v steps is known by the v gradients that were applied."""


class Grid(NamedTuple):
    """Who computes with whom, and who holds which shard."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


class SimulatedWorker(NamedTuple):
    """One member. mode: idle (never told of a generation), wait (for a generation or a digest), repair (for state
    from a donor), step, fin (committed the last step), over (left in good order).

    gen/members: the group it exchanges in. heard: of generations; digest: the newest one heard of. reacted: the newest
    generation it has reacted to. target: the one it reported for (0: none). boundary: it waits, but not for a failure.
    lanes: finished lanes of step `version`. serve: members that take state from here. due: members whose canary is
    compared in this step. told: the agent ever named it in a generation. stop: asked to leave at a step boundary.
    fenced: declared lost, but still running.

    Of several shards only: grid, next_grid: of `members` and `successors`. shard: which one `value` is. sealed: the
    column's sum for step `version`, once the others were told that it is there.
    """

    up: bool = True
    fenced: bool = False
    told: bool = False
    stop: bool = False
    mode: str = "idle"
    gen: int = 0
    members: tuple[int, ...] = ()
    heard: Heard = Heard()
    digest: int = -1
    reacted: int = 0
    target: int = 0
    successors: tuple[int, ...] = ()
    boundary: bool = True
    lineage: int = 0
    from_step: int = 0
    version: int = -1
    value: Value = ()
    record: tuple[int, Gradient] | None = None
    lanes: Gradient = ()
    todo: tuple[int, ...] = ()
    sent: bool = False
    reduced: bool = False
    serve: tuple[tuple[int, str], ...] = ()
    expect: str = ""
    verified: bool = False
    due: tuple[int, ...] = ()
    grid: Grid | None = None
    next_grid: Grid | None = None
    shard: int = 0
    sealed: Gradient = ()


class Message(NamedTuple):
    """Worker to worker. kind: H(eader), P(artial sums for a block's owner), R(educed block), S(eal), replay, forward,
    state."""

    kind: str
    generation: int
    step: int
    source: int
    block: int
    body: tuple[object, ...]


class Faults(NamedTuple):
    """What may still go wrong."""

    crashes: int = 0
    joins: int = 0
    zombies: int = 0
    breaks: int = 0
    scales: tuple[int, ...] = ()
    stops: int = 0


class World(NamedTuple):
    """leader: number of an interned leader state. mail: messages that arrived (a receiver may look at them whenever
    it likes, which is the delay). down/up: leader to worker and back, first in first out. links: broken links as
    (generation or -1 for every one, member, member). ledger: (lineage, from_step, step) of the lines written.
    checkpoints: (version, lineage), newest first."""

    leader: int
    workers: tuple[SimulatedWorker, ...]
    mail: tuple[frozenset[Message], ...]
    down: tuple[tuple[tuple[object, ...], ...], ...]
    up: tuple[tuple[int, ...], ...]
    links: frozenset[tuple[int, int, int]]
    ledger: frozenset[tuple[int, int, int]]
    checkpoints: tuple[tuple[int, int], ...]
    faults: Faults


Move = tuple[object, ...]
"""What happened, for a trace: a name and who it happened to."""


@dataclass(frozen=True)
class Violation(Exception):
    """An invariant does not hold. `kind` is a stable name, `detail` says what was seen."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def followed(ledger: frozenset[tuple[int, int, int]]) -> set[int]:
    """The steps that a ledger with these lines accounts for: `ledger.follow` says so, as it does for users."""
    lines = [_line(*line) for line in sorted(ledger)]
    return set(follow(lines))


def _line(lineage: int, from_step: int, step: int) -> LedgerLine:
    return LedgerLine(lineage, from_step, step, 0, 0, 0, 0, 0, 0, 0, (), (), (), 0.0)


@lru_cache(maxsize=256)
def canonical(version: int, lanes: int) -> Value:
    """The only right state after `version` steps."""
    return tuple(tuple((s, lane) for lane in range(lanes)) for s in range(version))
