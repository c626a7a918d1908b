"""One node's part in what several nodes agree on, through a store: (state, inputs, now) → (state, outputs). No I/O, no
clock, no randomness: whoever drives it carries out what it asks for, and tells it what came of that.

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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elastic_harness.membership import leader
from elastic_harness.membership.codec import decode, to_text
from elastic_harness.membership.lead import HISTORY, PATIENCE_S, Lead
from elastic_harness.membership.own_record import NODES, OwnRecord
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
HEAD = EVERYTHING + "head/"
LEADER, DECISION, FENCE, VALUES = HEAD + "leader", HEAD + "decision", HEAD + "fence", HEAD + "values"
STATE = EVERYTHING + "state"

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

# ---- state


@dataclass(frozen=True)
class NodeState:
    """All that one node knows. No mapping in it is ever changed in place."""

    own: OwnRecord  # what it tells the others
    limits: Limits
    registered: bool = False  # there is a lease
    has_read: bool = False  # what is decided; before that, nobody hears of this node
    leader_known: bool = False
    led_by: str = ""  # the key of the node that leads, as far as known
    unled_at: int = 0  # the revision of what stands in the leader's place and is no node
    decision: Entry | None = None  # the last one that could be read
    decision_at: int = 0  # the revision of what stands in its place now
    origin: str = ""  # of the decision that was heeded last
    origin_in: int = -1  # the session in which it was read
    heeded: int | None = None  # the last action that was carried out; None: no decision was ever read
    damaged: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # unreadable: at which revision, and why
    writes_asked: int = 0
    asked: Mapping[int, str] = field(default_factory=dict)  # the keys of writes that are under way, the first of each
    deciding: str = ""  # the decision that is being written
    returned_at: float | None = None  # when the last lease ended
    lead: Lead | None = None  # if this node leads

    @property
    def protocol(self) -> leader.State | None:
        """The protocol's state, if this node leads."""
        return self.lead.state if self.lead is not None else None


Step = tuple[NodeState, tuple[Output, ...]]


def begin(name: str, limits: Limits, places: int, known: Known, about: Mapping[str, Any]) -> NodeState:
    """Return the state of a node that has just come. `name`: of the node, never used by another one. `places`: how many
    workers it wants to have. `about`: what all nodes of a run must have in common, as names and values; a node whose
    own differs is excluded."""
    return NodeState(OwnRecord(name, places, known, about, str(about.get(HISTORY, ""))), limits)


def step(state: NodeState, inputs: Iterable[Input], now: float) -> Step:
    """Apply inputs that became known together: what follows from all of them is decided, and written, once. Late,
    repeated and unknown input is ignored."""
    before = state
    outputs: tuple[Output, ...] = ()
    for told in inputs:
        state, more = _take(state, told, now)
        outputs += more
    if state.damaged is not before.damaged:
        new = [(key, why) for key, (at, why) in state.damaged.items() if before.damaged.get(key, (-1,))[0] != at]
        outputs += tuple(Damaged(key, why) for key, why in new)
    state, writes = _writes(state, now)
    return state, outputs + writes


class Node:
    """Holds a node's state for those who drive it."""

    def __init__(self, name: str, limits: Limits, places: int, known: Known, about: Mapping[str, Any]) -> None:
        """See `begin`."""
        self.state = begin(name, limits, places, known, about)

    @property
    def leads(self) -> bool:
        return self.state.lead is not None

    def start(self) -> tuple[Output, ...]:
        """Return what it asks for first."""
        return (Register(),)

    def take(self, told: Input, now: float) -> tuple[Output, ...]:
        """Return what follows."""
        return self.take_all([told], now)

    def take_all(self, inputs: Iterable[Input], now: float) -> tuple[Output, ...]:
        """Return what follows from all of them together."""
        self.state, outputs = step(self.state, inputs, now)
        return outputs


def _take(state: NodeState, told: Input, now: float) -> Step:
    own = state.own
    match told:
        case Happened(event):
            own = own.happened(event)
        case Offered(generation, key, value):
            own = own.offer(generation, key, value)
        case PlacesScaled(places):
            own = own.scale(places)
        case NodeLeaves():
            own = own.leave()
        case Described(about):
            own = own.describe(about)
        case Registered():
            return replace(state, registered=True), (Follow(everything=False),)
        case LeaseEnded():
            return _begin_again(state, now)
        case Read(entries):
            return _read(state, entries, now)
        case Saw(change):
            late = state.lead is not None and change.revision < state.lead.revision
            if late and change.key == LEADER:  # it was seen before this node's own claim
                return state, ()
            return _saw(state, change.key, change.entry, now)
        case Wrote(number, revision):
            state, key = _answered(state, number)
            return _wrote(state, key, revision, now)
        case WriteRefused(number):
            state, key = _answered(state, number)
            return _refused(state, key, now)
        case NodeTick():
            return (state if state.lead is None else _led(state, state.lead.tick(now))), ()
    return (state if own is state.own else replace(state, own=own)), ()


def _led(state: NodeState, lead: Lead) -> NodeState:
    return state if lead is state.lead else replace(state, lead=lead)


def _begin_again(state: NodeState, now: float) -> Step:
    """The record is gone, and with it every claim: come back as a new node with the workers that live."""
    state = replace(
        state,
        own=state.own.begin_again(),
        registered=False,
        has_read=False,
        leader_known=False,
        decision=None,
        decision_at=0,
        asked={},
        returned_at=now,
        lead=None,
    )
    return state, (Register(),)


# ---- what the store says


def _read(state: NodeState, entries: tuple[Entry, ...], now: float) -> Step:
    by_key = {entry.key: entry for entry in entries}
    state, outputs = _saw(replace(state, has_read=True), LEADER, by_key.get(LEADER), now)
    if DECISION not in by_key:
        state = replace(state, decision=None, decision_at=0, heeded=state.heeded or 0)
    for key in (DECISION, VALUES):
        if key in by_key:
            state, more = _saw(state, key, by_key[key], now)
            outputs += more
    if state.lead is None:
        return state, outputs
    entries_of_nodes = {key: entry for key, entry in by_key.items() if key.startswith(NODES)}
    if not entries_of_nodes and state.decision_at:
        return state, (*outputs, Follow(everything=True))  # this was asked for before the claim
    records: dict[str, dict[str, Any] | None] = {}
    for key, entry in entries_of_nodes.items():
        state, records[key] = _readable(state, entry, read_record)
    state, decision = _last_decision(state, by_key.get(STATE))
    assert state.lead is not None
    return replace(state, lead=state.lead.read_all(records, decision, now)), outputs


def _last_decision(state: NodeState, kept: Entry | None) -> tuple[NodeState, dict[str, Any] | None]:
    """Return the decision to go on from, with the leader's state that was written together with it. None if there is
    none, or if one of the two cannot be read: then all is as if the store had lost everything."""
    if state.decision is None or kept is None or kept.revision != state.decision.revision:
        return state, None
    state, read = _readable(state, kept, read_state)
    assert state.decision is not None
    return state, None if read is None else read_decision(state.decision.value) | {"state": read}


def _readable(state: NodeState, entry: Entry, read: Callable[[str], T]) -> tuple[NodeState, T | None]:
    """Return what a value says; None, with the damage noted, if it cannot be read."""
    try:
        return state, read(entry.value)
    except ValueError as error:
        return _note_damage(state, entry, str(error)), None


def _note_damage(state: NodeState, entry: Entry, why: str) -> NodeState:
    if state.damaged.get(entry.key, (-1,))[0] == entry.revision:
        return state
    others = {key: said for key, said in state.damaged.items() if key != entry.key}
    return replace(state, damaged={**others, entry.key: (entry.revision, why)})


def _saw(state: NodeState, key: str, entry: Entry | None, now: float) -> Step:
    if key == LEADER:
        return _saw_leader(state, entry)
    if key == DECISION:
        return _saw_decision(state, entry, now)
    if key == VALUES and entry is not None:
        state, values = _readable(state, entry, read_values)
        if values is not None:
            return state, (Deliver(values),)
        return _publish_again(state), ()
    if key == STATE and entry is not None and state.lead is not None:
        state, kept = _readable(state, entry, read_state)
        return (_publish_again(state) if kept is None else state), ()
    if key.startswith(NODES) and state.lead is not None:
        return _saw_record(state, state.lead, key, entry), ()
    return state, ()


def _saw_leader(state: NodeState, entry: Entry | None) -> Step:
    state = replace(state, leader_known=True, led_by=entry.value if entry is not None else "", unled_at=0)
    if entry is not None and not (entry.lease and entry.value.startswith(NODES)):
        state = _note_damage(state, entry, f"it names {entry.value[:40]!r}, on no node's lease")
        state = replace(state, led_by="", unled_at=entry.revision)
    if state.lead is not None and (entry is None or entry.revision != state.lead.revision):
        return _step_down(state)
    if state.lead is None and entry is not None and state.led_by == state.own.key and state.own.ended is None:
        return _lead(state, entry.revision)
    return state, ()


def _saw_decision(state: NodeState, entry: Entry | None, now: float) -> Step:
    if entry is None or entry.revision <= state.decision_at:
        return state, ()
    state, decision = _readable(state, entry, read_decision)
    if decision is None:
        return _without_a_decision(replace(state, decision_at=entry.revision)), ()
    return _heed(replace(state, decision=entry, decision_at=entry.revision), decision, now)


def _saw_record(state: NodeState, lead: Lead, key: str, entry: Entry | None) -> NodeState:
    if entry is None:
        return replace(state, lead=lead.ended(key))
    state, record = _readable(state, entry, read_record)
    return replace(state, lead=lead.unreadable(key) if record is None else lead.changed(key, record))


def _without_a_decision(state: NodeState) -> NodeState:
    """What stands in the decision's place cannot be read. The leader has it still. If nobody leads, the next leader
    begins with what the nodes know."""
    return _publish_again(replace(state, own=state.own.write_anew(), heeded=state.heeded or 0))


def _publish_again(state: NodeState) -> NodeState:
    return state if state.lead is None else replace(state, lead=state.lead.publish_again())


def _answered(state: NodeState, number: int) -> tuple[NodeState, str]:
    """Return the key of a write of which the store has told what became of it; "" if nobody waits for that."""
    asked = {each: key for each, key in state.asked.items() if each != number}
    return replace(state, asked=asked), state.asked.get(number, "")


def _wrote(state: NodeState, key: str, revision: int, now: float) -> Step:
    if key == state.own.key:
        return replace(state, own=state.own.wrote()), ()
    if key == LEADER:
        return _lead(replace(state, led_by=state.own.key), revision)
    if key == DECISION:
        state, outputs = _saw_decision(state, Entry(DECISION, state.deciding, revision), now)
        return state, outputs + _look_again(state)
    return state, ()


def _refused(state: NodeState, key: str, now: float) -> Step:
    if key == state.own.key:
        return _begin_again(state, now)
    if key == LEADER:  # who leads may have come and gone meanwhile
        return replace(state, leader_known=False), (Follow(everything=False),)
    if key in (DECISION, VALUES) and state.lead is not None:
        return _step_down(state)
    return state, _look_again(state) if key == DECISION else ()


def _look_again(state: NodeState) -> tuple[Output, ...]:
    """The last decision is known now: whoever holds the leader's key and does not lead yet may."""
    return (Follow(everything=False),) if state.lead is None and state.led_by == state.own.key else ()


# ---- what is decided


def _heed(state: NodeState, decision: dict[str, Any], now: float) -> Step:
    """Carry out what is new in a decision. A node that has just come to the run has missed nothing of what was decided
    before, except that it may have ended."""
    if state.heeded is None:
        state = replace(state, origin=decision["origin"], heeded=decision["count"])
        if decision["finished"] is not None:
            done = leader.Done(decision["finished"])
            return replace(state, own=replace(state.own, ended=done)), (Carry(done),)
    if decision["origin"] != state.origin:  # the store had lost everything
        known_to_the_store = state.origin_in == state.own.session
        state = replace(state, origin=decision["origin"], heeded=0)
        if known_to_the_store:  # but not this node's record, of which the new leader has only a part
            return _begin_again(state, now)
    state = replace(state, origin_in=state.own.session, own=state.own.heed(decision))
    state, outputs = _carry_out(state, decision["actions"])
    own = state.own
    if own.key in (decision.get("damaged") or ()):
        own = own.write_anew()
    if own.key in decision["excluded"]:
        outputs += (Excluded(decision["excluded"][own.key]),)
    if decision["members"] is not None:
        own = own.take_part(decision["members"], formed=decision["formed"])
        if own.written < 0 and own.writing is None and not decision["paused"]:
            own = own.leave_behind(decision["members"])
    return replace(state, own=own), outputs


def _carry_out(state: NodeState, actions: Iterable[tuple[int, Any]]) -> Step:
    """Carry out the actions that this node has not heeded yet."""
    heeded, own = state.heeded or 0, state.own
    new = [(number, decode(action)) for number, action in actions if number > heeded]
    if not new:
        return state, ()
    missed = new[0][0] > heeded + 1
    outputs: tuple[Output, ...] = ()
    for number, action in new:
        if own.ended is not None:
            break  # what follows is of a job that was launched again, without this node
        heeded = number
        if missed and isinstance(action, leader.Announce):  # an urgent one may be among what was missed
            action = leader.Announce(replace(action.generation, urgent=True))
        if isinstance(action, leader.Done | leader.Poison | leader.Stop):
            own = own.end(action)
        outputs += (Carry(action),)
    return replace(state, heeded=heeded, own=own), outputs


# ---- leading


def _lead(state: NodeState, revision: int) -> Step:
    """Begin to lead, once: the claim is told of as an answer, and seen as a change. A leader begins only after it knows
    what has become of a decision of an earlier time."""
    if state.lead is not None or DECISION in state.asked.values():
        return state, ()
    patient_until = None if state.returned_at is None else state.returned_at + PATIENCE_S
    lead = Lead(state.own.key, revision, state.limits, patient_until, _new_origin(state, revision))
    return replace(state, lead=lead), (Follow(everything=True),)


def _new_origin(state: NodeState, revision: int) -> str:
    """Return a name that no decision's origin has had: what was decided may be unreadable by now, and the same claim
    leads to begin with nothing a second time."""
    origin = f"{state.own.key}@{revision}"
    return f"{origin}.{state.writes_asked}" if state.origin.startswith(origin) else origin


def _step_down(state: NodeState) -> Step:
    return replace(state, lead=None), (Follow(everything=False),)


# ---- what is written


def _writes(state: NodeState, now: float) -> Step:
    """Write what is new: the node's record, its claim if nobody leads, and what it decides if it leads."""
    if not state.registered or not state.has_read:
        return state, ()
    own = state.own
    outputs: tuple[Output, ...] = ()
    if own.writing is None and own.written < own.changes:
        unwritten = {own.key: 0} if own.written < 0 else {}  # after that the lease alone says whose it is
        state, outputs = _write(replace(state, own=own.write()), {own.key: own.text}, unwritten, leased=True)
    if state.leader_known and not state.led_by and own.written >= 0 and own.ended is None:
        if LEADER not in state.asked.values():
            state, claim = _write(state, {LEADER: own.key}, {LEADER: state.unled_at}, leased=True)
            outputs += claim
    if state.lead is None:
        return state, outputs
    state, published = _publish(state, state.lead, now)
    return state, outputs + published


def _publish(state: NodeState, lead: Lead, now: float) -> Step:
    """Publish what is new: a decision on top of the decision before, and the addresses."""
    decision, values, under_way = None, None, state.asked.values()
    if DECISION not in under_way:
        lead, decision = lead.news(now)
    if VALUES not in under_way:
        lead, values = lead.new_values()
    state = _led(state, lead)
    outputs: tuple[Output, ...] = ()
    if decision is not None:
        kept, text = to_text(decision.pop("state")), to_text(decision)
        compare = {DECISION: state.decision_at, LEADER: lead.revision}
        state, outputs = _write(replace(state, deciding=text), {DECISION: text, STATE: kept}, compare, leased=False)
    if values is not None:
        state, more = _write(state, {VALUES: to_text(values)}, {LEADER: lead.revision}, leased=True)
        outputs += more
    return state, outputs


def _write(state: NodeState, entries: Mapping[str, str], compare: dict[str, int], *, leased: bool) -> Step:
    number = state.writes_asked + 1
    state = replace(state, writes_asked=number, asked={**state.asked, number: next(iter(entries))})
    return state, (Write(number, tuple(entries.items()), compare, leased),)
