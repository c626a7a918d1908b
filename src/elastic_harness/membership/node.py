"""One node's part in what several nodes agree on, through a store. No I/O, no clock, no randomness: whoever drives it
carries out what `take` asks for, and tells it what came of that.

    run/node/KEY        one record for each node, on its lease: what happened to its workers, event by event, and where
                        they can be reached
    run/head/leader     the node that leads, on its lease
    run/head/decision   what the leader has concluded: how far it has read each record, its newest actions
    run/head/values     where the members can be reached, gathered by the leader from the records
    run/state           beside the decision, the leader's state: only the next leader reads it

Every node can lead. The leader reads all records, gives their events to `leader.step`, and publishes the actions; all
nodes, itself included, carry out what is published, in the order in which it was. A decision can only be written by who
holds the leader's key, and only on top of the decision it knows. What was read but not yet published stays in the
records, so the next leader, who begins at the last decision, reads it again: nothing is lost with a leader.

While the store is away nothing happens here: workers go on stepping, and what befalls them waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elastic_harness.membership import leader
from elastic_harness.membership.codec import decode, encode, to_text
from elastic_harness.membership.leading import HISTORY, PATIENCE_S, Leading
from elastic_harness.membership.records import (
    Known,
    Values,
    read_decision,
    read_record,
    read_state,
    read_values,
)
from elastic_harness.membership.store import Change, Entry, Put
from elastic_harness.membership.types import Limits

EVERYTHING = "run/"
HEAD, NODES = EVERYTHING + "head/", EVERYTHING + "node/"
LEADER, DECISION, FENCE, VALUES = HEAD + "leader", HEAD + "decision", HEAD + "fence", HEAD + "values"
STATE = EVERYTHING + "state"
GENERATIONS_OFFERED = 2  # a planned one may be announced while members still connect in the one before

# ---- what a node is told


@dataclass(frozen=True)
class Happened:
    """Something befell a worker of this node."""

    event: leader.Event


@dataclass(frozen=True)
class Offered:
    """A worker of this node set a value that the other members of its generation need: where to reach it."""

    generation: int
    key: str
    value: str


@dataclass(frozen=True)
class PlacesScaled:
    """This node wants so many workers now."""

    places: int


@dataclass(frozen=True)
class NodeLeaves:
    """This node is to leave at a step boundary: all of its workers are, and it wants none any more."""


@dataclass(frozen=True)
class Described:
    """What this node's workers are: see `about`. Told before the first of them is ready."""

    about: Mapping[str, Any]


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
class WriteRefused:
    """The write of this number did not take place and never will: something it expects is not so."""

    number: int


@dataclass(frozen=True)
class NodeTick:
    """Time passed."""


Input = (
    Happened
    | Offered
    | Described
    | PlacesScaled
    | NodeLeaves
    | Registered
    | LeaseEnded
    | Read
    | Saw
    | Wrote
    | WriteRefused
    | NodeTick
)

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
    """Write entries, all or none, if all keys in `compare` are at their revisions; tell whether that took place.
    `leased`: they hang on the node's lease. If not, FENCE is written with them, which does: after a store has lost
    everything, revisions may be as they were, but leases are not. No two writes of a key are asked for at a time."""

    number: int
    entries: tuple[tuple[str, str], ...]
    compare: dict[str, int]
    leased: bool

    def puts(self, lease: int) -> list[Put]:
        """What this is for a store."""
        puts = [Put(key, value, lease if self.leased else 0) for key, value in self.entries]
        return puts if self.leased else [*puts, Put(FENCE, "", lease)]


@dataclass(frozen=True)
class Carry:
    """Carry out an action for this node's workers."""

    action: leader.Action


@dataclass(frozen=True)
class Deliver:
    """Values that members have set, of generations that are still of interest. Some may have been delivered before."""

    values: Values


@dataclass(frozen=True)
class Excluded:
    """This node cannot take part in the run: it differs from it."""

    reason: str


@dataclass(frozen=True)
class Damaged:
    """A value in the store is none that a node wrote. It is ignored; the node whose it is writes it anew."""

    key: str
    why: str


Output = Register | Follow | Write | Carry | Deliver | Excluded | Damaged
T = TypeVar("T")


class Node:
    """`name`: of the node, never used by another one. `places`: how many workers it wants to have. `about`: what all
    nodes of a run must have in common, as names and values; a node whose own differs is excluded."""

    def __init__(self, name: str, limits: Limits, places: int, known: Known, about: Mapping[str, Any]) -> None:
        self.name = name
        self.known = known
        self.leader = ""  # the key of the node that leads, as far as known
        self.ended: leader.Action | None = None  # how the job ended
        self._limits = limits
        self._places = places
        self._about = dict(about)
        self._members: dict[str, None] = {}  # living ones, in order of age
        self._session = 0
        self._leaves = False
        self._registered = False
        self._has_read = False  # what is decided; before that, nobody hears of this node
        self._events: list[tuple[int, leader.Event]] = []
        self._last = 0
        self._offered: dict[int, dict[str, str]] = {}
        self._changes = 0
        self._written = -1  # how many changes the record holds; -1: there is no record
        self._writing: int | None = None
        self._revision = 0
        self._writes_asked = 0
        self._asked: dict[int, str] = {}  # the keys of writes that are under way, the first of each
        self._returned_at: float | None = None  # when the last lease ended
        self._ever: set[str] = set()  # workers of this node that were in a generation
        self._veterans: set[str] = set()  # … in one that was formed: they have, or are about to have, the state
        self._leader_known = False
        self._decision: Entry | None = None  # the last one that could be read
        self._decision_at = 0  # the revision of what stands in its place now
        self._unled_at = 0  # the revision of what stands in the leader's place and is no node
        self._damaged: dict[str, int] = {}  # keys whose values cannot be read, and at which revision that was said
        self._complaints: list[Output] = []
        self._deciding = ""  # the decision that is being written
        self._origin = ""
        self._origin_in = -1  # the session in which it was last read
        self.history = str(about.get(HISTORY, ""))  # which history of training this node has a part in
        self._heeded: int | None = None  # the last action that was carried out; None: no decision was ever read
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
        return self.take_all([told], now)

    def take_all(self, inputs: Iterable[Input], now: float) -> list[Output]:
        """What follows from all of them together: that is decided, and written, once."""
        outputs: list[Output] = []
        for told in inputs:
            outputs += self._take(told, now)
        complaints, self._complaints = self._complaints, []
        return outputs + complaints + self._writes(now)

    def _take(self, told: Input, now: float) -> list[Output]:
        outputs: list[Output] = []
        match told:
            case Happened(event):
                self._happened(event)
            case Offered(generation, key, value):
                self._offer(generation, key, value)
            case PlacesScaled(places):
                self._places = places
                self._changes += 1
            case NodeLeaves():
                self._leaves = True
                self._places = 0
                self._changes += 1
                for member in self._members:
                    self._happened(leader.Leaving(member))
            case Described(about):
                self._about |= about
                self._changes += 1
            case Registered():
                self._registered = True
                outputs.append(Follow(everything=False))
            case LeaseEnded():
                outputs += self._begin_again(now)
            case Read(entries):
                outputs += self._read(entries, now)
            case Saw(change):
                late = self._leading is not None and change.revision < self._leading.revision
                if not (late and change.key == LEADER):  # it was seen before this node's own claim
                    outputs += self._saw(change.key, change.entry, now)
            case Wrote(number, revision):
                outputs += self._wrote(self._asked.pop(number, ""), revision, now)
            case WriteRefused(number):
                outputs += self._refused(self._asked.pop(number, ""), now)
            case NodeTick():
                if self._leading is not None:
                    self._leading.tick(now)
        return outputs

    # ---- this node's own record

    def _happened(self, event: leader.Event) -> None:
        if self.ended is not None:
            return
        match event:
            case leader.Committed() if self.known.born:
                return
            case leader.Committed():
                self.known = replace(self.known, born=True)
            case leader.Saved() if self.known.saved:
                return
            case leader.Saved():
                self.known = replace(self.known, saved=True)
            case leader.Ready(member):
                self._members[member] = None
            case leader.Lost(member):
                self._members.pop(member, None)
        self._last += 1
        self._changes += 1
        self._events.append((self._last, event))

    def _offer(self, generation: int, key: str, value: str) -> None:
        self._offered.setdefault(generation, {})[key] = value
        for old in sorted(self._offered)[:-GENERATIONS_OFFERED]:
            del self._offered[old]
        self._changes += 1

    def _begin_again(self, now: float) -> list[Output]:
        """The record is gone, and with it every claim: come back as a new node with the workers that live, and tell
        once more what may not have been read. All events may be told twice."""
        self._session += 1
        self._returned_at = now
        self._registered = self._has_read = False
        unread = [event for _, event in self._events if not isinstance(event, leader.Ready)]
        self._events, self._last, self._written, self._writing, self._revision = [], 0, -1, None, 0
        self._leading, self._leader_known, self._decision, self._decision_at = None, False, None, 0
        self._asked.clear()
        leaving = map(leader.Leaving, self._members if self._leaves else ())
        for event in [*map(leader.Ready, self._members), *leaving, *unread]:
            self._happened(event)
        return [Register()]

    def _writes(self, now: float) -> list[Output]:
        if not self._registered or not self._has_read:
            return []
        wanted: list[Output] = []
        if self._writing is None and self._written < self._changes:
            self._writing = self._changes
            record = {
                "about": self._about,
                "places": self._places,
                "members": list(self._members),
                "veterans": [member for member in self._members if member in self._veterans],
                "known": vars(self.known),
                "events": [[number, encode(event)] for number, event in self._events],
                "values": self._offered,
            }
            unwritten = {self.key: 0} if self._written < 0 else {}  # after that the lease alone says whose it is
            wanted.append(self._write({self.key: to_text(record)}, unwritten, leased=True))
        if self._leader_known and not self.leader and self._written >= 0 and self.ended is None:
            if LEADER not in self._asked.values():
                wanted.append(self._write({LEADER: self.key}, {LEADER: self._unled_at}, leased=True))
        return wanted + self._leaders_writes(now)

    def _write(self, entries: Mapping[str, str], compare: dict[str, int], *, leased: bool) -> Write:
        self._writes_asked += 1
        self._asked[self._writes_asked] = next(iter(entries))
        return Write(self._writes_asked, tuple(entries.items()), compare, leased)

    # ---- what the store says

    def _read(self, entries: tuple[Entry, ...], now: float) -> list[Output]:
        self._has_read = True
        by_key = {entry.key: entry for entry in entries}
        outputs = self._saw(LEADER, by_key.get(LEADER), now)
        if DECISION in by_key:
            outputs += self._saw(DECISION, by_key[DECISION], now)
        else:
            self._decision, self._decision_at = None, 0
            self._heeded = self._heeded or 0
        if VALUES in by_key:
            outputs += self._saw(VALUES, by_key[VALUES], now)
        if self._leading is None:
            return outputs
        entries_of_nodes = {key: entry for key, entry in by_key.items() if key.startswith(NODES)}
        if not entries_of_nodes and self._decision_at:
            return [*outputs, Follow(everything=True)]  # this was asked for before the claim
        records = {key: self._readable(entry, read_record) for key, entry in entries_of_nodes.items()}
        self._leading.read_all(records, self._last_decision(by_key.get(STATE)), now)
        return outputs

    def _last_decision(self, state: Entry | None) -> dict[str, Any] | None:
        """The decision to go on from, with the state that was written together with it. None if there is none, or if
        one of the two cannot be read: then all is as if the store had lost everything."""
        if self._decision is None or state is None or state.revision != self._decision.revision:
            return None
        read = self._readable(state, read_state)
        return None if read is None else read_decision(self._decision.value) | {"state": read}

    def _readable(self, entry: Entry, read: Callable[[str], T]) -> T | None:
        """What a value says; None, and a complaint, if it is damaged."""
        try:
            return read(entry.value)
        except ValueError as error:
            self._complain(entry, str(error))
            return None

    def _complain(self, entry: Entry, why: str) -> None:
        if self._damaged.get(entry.key) != entry.revision:
            self._damaged[entry.key] = entry.revision
            self._complaints.append(Damaged(entry.key, why))

    def _saw(self, key: str, entry: Entry | None, now: float) -> list[Output]:
        if key == LEADER:
            self._leader_known = True
            self.leader = entry.value if entry is not None else ""
            self._unled_at = 0
            if entry is not None and not (entry.lease and entry.value.startswith(NODES)):
                self._complain(entry, f"it names {entry.value[:40]!r}, on no node's lease")
                self.leader, self._unled_at = "", entry.revision
            if self._leading is not None and (entry is None or entry.revision != self._leading.revision):
                return self._step_down()
            if self._leading is None and entry is not None and self.leader == self.key and self.ended is None:
                return self._lead(entry.revision)
        elif key == DECISION and entry is not None:
            if entry.revision > self._decision_at:
                self._decision_at = entry.revision
                decision = self._readable(entry, read_decision)
                if decision is None:
                    return self._without_a_decision()
                self._decision = entry
                return self._heed(decision, now)
        elif key == VALUES and entry is not None:
            values = self._readable(entry, read_values)
            if values is not None:
                return [Deliver(values)]
            if self._leading is not None:
                self._leading.publish_again()
        elif key == STATE and entry is not None and self._leading is not None:
            if self._readable(entry, read_state) is None:
                self._leading.publish_again()
        elif key.startswith(NODES) and self._leading is not None:
            record = None if entry is None else self._readable(entry, read_record)
            if entry is None:
                self._leading.ended(key)
            elif record is None:
                self._leading.damaged(key)
            else:
                self._leading.changed(key, record)
        return []

    def _without_a_decision(self) -> list[Output]:
        """What stands in the decision's place cannot be read. Who leads has it still; and if nobody leads, the next
        leader begins with what the nodes know."""
        self._changes += 1
        self._heeded = self._heeded or 0
        if self._leading is not None:
            self._leading.publish_again()
        return []

    def _wrote(self, key: str, revision: int, now: float) -> list[Output]:
        if key == self.key and self._writing is not None:
            self._written, self._revision, self._writing = self._writing, revision, None
        elif key == LEADER:
            self.leader = self.key
            return self._lead(revision)
        elif key == DECISION:
            outputs = self._saw(DECISION, Entry(DECISION, self._deciding, revision), now)
            return [*outputs, *self._look_again()]
        return []

    def _refused(self, key: str, now: float) -> list[Output]:
        if key == self.key:
            return self._begin_again(now)
        if key == LEADER:
            self._leader_known = False  # who leads may have come and gone meanwhile
            return [Follow(everything=False)]
        if key in (DECISION, VALUES) and self._leading is not None:
            return self._step_down()
        return self._look_again() if key == DECISION else []

    def _look_again(self) -> list[Output]:
        """The last decision is known now: whoever holds the leader's key and does not lead yet may."""
        return [Follow(everything=False)] if self._leading is None and self.leader == self.key else []

    def _heed(self, decision: dict[str, Any], now: float) -> list[Output]:
        """Carry out what is new in a decision. A node that has just come to the run has missed nothing of what was
        decided before, except that it may have ended."""
        newest = decision["count"]
        if self._heeded is None:
            self._origin, self._heeded = decision["origin"], newest
            if decision["finished"] is not None:
                self.ended = leader.Done(decision["finished"])
                return [Carry(self.ended)]
        if decision["origin"] != self._origin:  # the store had lost everything
            self._origin, self._heeded = decision["origin"], 0
            if self._origin_in == self._session:  # but not this node's record, of which the new leader has only a part
                return self._begin_again(now)
        self._origin_in = self._session
        if not self.history and HISTORY in decision["about"] and decision["formed"]:
            self.history = self._about[HISTORY] = decision["about"][HISTORY]
        taken = decision["taken"].get(self.key, 0)
        self._events = [(number, event) for number, event in self._events if number > taken]
        self.known = self.known.and_also(Known(**decision["known"]))
        outputs: list[Output] = []
        actions = [(number, decode(action)) for number, action in decision["actions"] if number > self._heeded]
        missed = bool(actions) and actions[0][0] > self._heeded + 1
        for number, action in actions:
            if self.ended is not None:
                break  # what follows is of a job that was launched again, without this node
            self._heeded = number
            if missed and isinstance(action, leader.Announce):  # an urgent one may be among what was missed
                action = leader.Announce(replace(action.generation, urgent=True))
            if isinstance(action, leader.Done | leader.Poison | leader.Stop):
                self._end(action)
            outputs.append(Carry(action))
        if self.key in (decision.get("damaged") or ()):
            self._changes += 1
        if self.key in decision["excluded"]:
            outputs.append(Excluded(decision["excluded"][self.key]))
        members = decision["members"]
        if members is not None:
            ours = [m for m in members if m in self._members]
            self._ever.update(ours)
            if decision["formed"]:
                self._veterans.update(ours)
            if self._written < 0 and self._writing is None and not decision["paused"]:
                self._leave_behind(members)
        return outputs

    def _end(self, action: leader.Action) -> None:
        """The job is over: nothing is offered to those who may begin it again while this node's workers end."""
        self._places = 0
        self._changes += 1
        self._events.clear()
        for member in list(self._members):
            self._happened(leader.Lost(member))
        self.ended = action

    def _leave_behind(self, members: Sequence[str]) -> None:
        """Before this node comes back: those of its workers without whom the others went on will leave, and are not to
        be taken for new ones. (If the others wait, they do so too, and may hold the state.)"""
        gone = {m for m in self._members if m in self._ever and m not in members}
        self._members = {m: None for m in self._members if m not in gone}
        self._events = [e for e in self._events if not (isinstance(e[1], leader.Ready) and e[1].member in gone)]

    # ---- leading

    def _lead(self, revision: int) -> list[Output]:
        """Begin to lead, once: that the claim took place is told and seen. Not before it is known what has become of a
        decision of an earlier time."""
        if self._leading is not None or DECISION in self._asked.values():
            return []
        patient_until = None if self._returned_at is None else self._returned_at + PATIENCE_S
        self._leading = Leading(self.key, revision, self._limits, patient_until)
        return [Follow(everything=True)]

    def _step_down(self) -> list[Output]:
        self._leading = None
        return [Follow(everything=False)]

    def _leaders_writes(self, now: float) -> list[Output]:
        """Publish what is new: a decision on top of the decision before, and the addresses."""
        leading, under_way = self._leading, self._asked.values()
        if leading is None:
            return []
        wanted: list[Output] = []
        decision = leading.news(now) if DECISION not in under_way else None
        if decision is not None:
            entries = {STATE: to_text(decision.pop("state"))}
            self._deciding = to_text(decision)
            compare = {DECISION: self._decision_at, LEADER: leading.revision}
            wanted.append(self._write({DECISION: self._deciding, **entries}, compare, leased=False))
        values = leading.new_values() if VALUES not in under_way else None
        if values is not None:
            wanted.append(self._write({VALUES: to_text(values)}, {LEADER: leading.revision}, leased=True))
        return wanted
