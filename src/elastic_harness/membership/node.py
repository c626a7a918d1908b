"""One node's part in what several nodes agree on, through a store. No I/O, no clock, no randomness: whoever drives it
carries out what `take` asks for, and tells it what came of that.

    node/KEY        one record for each node, on its lease: what happened to its workers, event by event
    head/leader     the node that leads, on its lease
    head/decision   what the leader has concluded: its state, how far it has read each record, its newest actions

Every node can lead. The leader reads all records, gives their events to `leader.step`, and publishes the actions; all
nodes, itself included, carry out what is published, in the order in which it was. A decision can only be written by who
holds the leader's key, and only on top of the decision it knows. What was read but not yet published stays in the
records, so the next leader, who begins at the last decision, reads it again: nothing is lost with a leader.

While the store is away nothing happens here: workers go on stepping, and what befalls them waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_harness.membership import leader
from elastic_harness.membership.codec import decode, encode
from elastic_harness.membership.leading import PATIENCE_S, Known, Leading
from elastic_harness.membership.store import Change, Entry
from elastic_harness.membership.types import Limits

HEAD, NODES = "head/", "node/"
LEADER, DECISION, FENCE = HEAD + "leader", HEAD + "decision", HEAD + "fence"

# ---- what a node is told


@dataclass(frozen=True)
class Happened:
    """Something befell a worker of this node."""

    event: leader.Event


@dataclass(frozen=True)
class Registered:
    """There is a new lease: the node's record and its claim to lead hang on it."""


@dataclass(frozen=True)
class LeaseEnded:
    """The lease was not kept alive, or the store forgot it."""


@dataclass(frozen=True)
class Read:
    """All entries that this node follows, as they are now; changes after them will be seen."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Saw:
    change: Change


@dataclass(frozen=True)
class Wrote:
    """The write of this number took place."""

    number: int
    revision: int


@dataclass(frozen=True)
class Refused:
    """The write of this number did not take place and never will: something it expects is not so."""

    number: int


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Input = Happened | Registered | LeaseEnded | Read | Saw | Wrote | Refused | Tick

# ---- what it asks for


@dataclass(frozen=True)
class Register:
    """Get a new lease."""


@dataclass(frozen=True)
class Follow:
    """Read and watch the head, or with `everything` the nodes' records too; in place of what was followed before."""

    everything: bool


@dataclass(frozen=True)
class Write:
    """Write an entry, on the lease if `leased`, if all keys in `compare` are at their revisions; tell whether that
    took place. One that is not leased is written together with FENCE, which is: after a store has lost everything,
    revisions may be as they were, but leases are not. No two writes of a key are asked for at a time."""

    number: int
    key: str
    value: str
    compare: dict[str, int]
    leased: bool


@dataclass(frozen=True)
class Carry:
    """Carry out an action for this node's workers."""

    action: leader.Action


Output = Register | Follow | Write | Carry


class Node:
    """`name`: of the node, never used by another one. `places`: how many workers it wants to have."""

    def __init__(self, name: str, limits: Limits, places: int, known: Known, about: dict[str, Any]) -> None:
        self.name = name
        self.known = known
        self.leader = ""  # the key of the node that leads, as far as known
        self._limits = limits
        self._places = places
        self._about = about
        self._members: dict[str, None] = {}  # living ones, in order of age
        self._session = 0
        self._registered = False
        self._events: list[tuple[int, leader.Event]] = []
        self._last = 0
        self._written = -1  # how many events the record holds; -1: there is no record
        self._writing: int | None = None
        self._revision = 0
        self._writes_asked = 0
        self._asked: dict[int, str] = {}  # the keys of writes that are under way
        self._returned_at: float | None = None  # when the last lease ended
        self._ever: set[str] = set()  # workers of this node that were in a generation
        self._leader_known = False
        self._decision: Entry | None = None
        self._deciding = ""  # the decision that is being written
        self._origin, self._heeded = "", 0
        self._leading: Leading | None = None

    @property
    def key(self) -> str:
        return f"{NODES}{self.name}.{self._session}"

    @property
    def leads(self) -> bool:
        return self._leading is not None

    @property
    def state(self) -> leader.State | None:
        """The leader's state, if this node leads."""
        return self._leading.state if self._leading else None

    def start(self) -> list[Output]:
        return [Register()]

    def take(self, told: Input, now: float) -> list[Output]:
        """What follows. Late, repeated and unknown input is ignored."""
        outputs: list[Output] = []
        match told:
            case Happened(event):
                self._happened(event)
            case Registered():
                self._registered = True
                outputs.append(Follow(everything=False))
            case LeaseEnded():
                outputs += self._begin_again(now)
            case Read(entries):
                outputs += self._read(entries, now)
            case Saw(change):
                outputs += self._saw(change.key, change.entry, now)
            case Wrote(number, revision):
                outputs += self._wrote(self._asked.pop(number, ""), revision, now)
            case Refused(number):
                outputs += self._refused(self._asked.pop(number, ""), now)
            case Tick():
                if self._leading is not None:
                    self._leading.tick(now)
        return outputs + self._writes(now)

    # ---- this node's own record

    def _happened(self, event: leader.Event) -> None:
        match event:
            case leader.Committed() if self.known.born:
                return
            case leader.Committed():
                self.known = replace(self.known, born=True)
            case leader.Ready(member):
                self._members[member] = None
            case leader.Lost(member):
                self._members.pop(member, None)
        self._last += 1
        self._events.append((self._last, event))

    def _begin_again(self, now: float) -> list[Output]:
        """The record is gone, and with it every claim: come back as a new node with the workers that live, and tell
        once more what may not have been read. All events may be told twice."""
        self._session += 1
        self._returned_at = now
        self._registered = False
        unread = [event for _, event in self._events if not isinstance(event, leader.Ready)]
        self._events, self._last, self._written, self._writing, self._revision = [], 0, -1, None, 0
        self._leading, self._leader_known, self._decision = None, False, None
        self._asked.clear()
        for event in [*map(leader.Ready, self._members), *unread]:
            self._happened(event)
        return [Register()]

    def _writes(self, now: float) -> list[Output]:
        if not self._registered:
            return []
        wanted: list[Output] = []
        if self._writing is None and self._written < self._last:
            self._writing = self._last
            record = {
                **self._about,
                "places": self._places,
                "members": list(self._members),
                "known": vars(self.known),
                "events": [[number, encode(event)] for number, event in self._events],
            }
            wanted.append(self._write(self.key, _text(record), {self.key: self._revision}, leased=True))
        if self._leader_known and not self.leader and self._written >= 0 and LEADER not in self._asked.values():
            wanted.append(self._write(LEADER, self.key, {LEADER: 0}, leased=True))
        return wanted + self._decisions(now)

    def _write(self, key: str, value: str, compare: dict[str, int], *, leased: bool) -> Write:
        self._writes_asked += 1
        self._asked[self._writes_asked] = key
        return Write(self._writes_asked, key, value, compare, leased)

    # ---- what the store says

    def _read(self, entries: tuple[Entry, ...], now: float) -> list[Output]:
        by_key = {entry.key: entry for entry in entries}
        outputs = self._saw(LEADER, by_key.get(LEADER), now)
        if DECISION in by_key:
            outputs += self._saw(DECISION, by_key[DECISION], now)
        else:
            self._decision = None
        if self._leading is not None:
            records = {key: json.loads(entry.value) for key, entry in by_key.items() if key.startswith(NODES)}
            decision = None if self._decision is None else json.loads(self._decision.value)
            self._leading.read_all(records, decision, now)
        return outputs

    def _saw(self, key: str, entry: Entry | None, now: float) -> list[Output]:
        if key == LEADER:
            self._leader_known = True
            self.leader = entry.value if entry is not None else ""
            if self._leading is not None and (entry is None or entry.revision != self._leading.revision):
                return self._step_down()
        elif key == DECISION and entry is not None:
            if self._decision is None or entry.revision > self._decision.revision:
                self._decision = entry
                return self._heed(json.loads(entry.value))
        elif key.startswith(NODES) and self._leading is not None:
            if entry is None:
                self._leading.ended(key, now)
            else:
                self._leading.changed(key, json.loads(entry.value), now)
        return []

    def _wrote(self, key: str, revision: int, now: float) -> list[Output]:
        if key == self.key and self._writing is not None:
            self._written, self._revision, self._writing = self._writing, revision, None
        elif key == LEADER:
            self.leader = self.key
            patient_until = None if self._returned_at is None else self._returned_at + PATIENCE_S
            self._leading = Leading(self.key, revision, self._limits, patient_until)
            return [Follow(everything=True)]
        elif key == DECISION:
            return self._saw(DECISION, Entry(DECISION, self._deciding, revision), now)
        return []

    def _refused(self, key: str, now: float) -> list[Output]:
        if key == self.key:
            return self._begin_again(now)
        if key == LEADER:
            self._leader_known = False  # it will be seen who leads
        if key == DECISION and self._leading is not None:
            return self._step_down()
        return []

    def _heed(self, decision: dict[str, Any]) -> list[Output]:
        """Carry out what is new in a decision."""
        if decision["origin"] != self._origin:  # the store had lost everything
            self._origin, self._heeded = decision["origin"], 0
        taken = decision["taken"].get(self.key, 0)
        self._events = [(number, event) for number, event in self._events if number > taken]
        self.known = self.known.and_also(Known(**decision["known"]))
        outputs: list[Output] = []
        for number, action in decision["actions"]:
            if number > self._heeded:
                self._heeded = number
                outputs.append(Carry(decode(action)))
        members = decision["members"]
        if members is not None:
            self._ever.update(m for m in members if m in self._members)
            if self._written < 0 and self._writing is None:
                self._leave_behind(members)
        return outputs

    def _leave_behind(self, members: Sequence[str]) -> None:
        """Before this node comes back: those of its workers without whom the others went on will leave, and are not to
        be taken for new ones."""
        gone = {m for m in self._members if m in self._ever and m not in members}
        self._members = {m: None for m in self._members if m not in gone}
        self._events = [e for e in self._events if not (isinstance(e[1], leader.Ready) and e[1].member in gone)]

    # ---- leading

    def _step_down(self) -> list[Output]:
        self._leading = None
        return [Follow(everything=False)]

    def _decisions(self, now: float) -> list[Output]:
        """Publish what is new, on top of the decision before."""
        if self._leading is None or DECISION in self._asked.values():
            return []
        decision = self._leading.news(now)
        if decision is None:
            return []
        self._deciding = _text(decision)
        on_top_of = self._decision.revision if self._decision is not None else 0
        compare = {DECISION: on_top_of, LEADER: self._leading.revision}
        return [self._write(DECISION, self._deciding, compare, leased=False)]


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
