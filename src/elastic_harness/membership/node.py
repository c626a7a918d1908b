"""One node's part in what several nodes agree on, through a store: (state, inputs, now) → (state, outputs).

No I/O, no clock, no randomness. The driver (the agent, or a simulator) carries out what the node asks for, and tells it
the outcome. The store has:

    run/node/KEY        one record for each node, on its lease: what happened to its workers, event by event, and their
                        addresses
    run/head/leader     the node that leads, on its lease
    run/head/decision   the leader's conclusions: how far it has read each record, its newest actions
    run/head/values     the addresses of the members, which the leader gathers from the records
    run/head/fence      a key on the leader's lease, written with each decision
    run/state           the leader's state, written with the decision; only the next leader reads it

Every node can lead. The leader reads all records, gives their events to `protocol.steps`, and publishes the actions.
All nodes, the leader's own included, carry out the actions in the order in which they were published. Only the holder
of the leader's key can write a decision, and only on top of the decision that it knows. Events that were read but not
yet published stay in the records. The next leader begins at the last decision and reads them again, so nothing is lost
with a leader.

While the store is away, nothing is decided. Workers go on stepping, and what happens to them waits to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elastic_harness.membership import protocol
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
    """Something happened to a worker of this node."""

    event: protocol.Event


@dataclass(frozen=True)
class Offered:
    """A worker of this node set a value that the other members of its generation need: its address."""

    generation: int
    key: str
    value: str


@dataclass(frozen=True)
class PlacesScaled:
    """This node now wants to have so many workers."""

    places: int


@dataclass(frozen=True)
class NodeLeaves:
    """This node is to leave at a step boundary. All of its workers leave, and it wants no others."""


@dataclass(frozen=True)
class Described:
    """More entries that all nodes must have in common, as this node's workers have them: see `begin`. The driver tells
    them before the first worker is ready."""

    about: Mapping[str, Any]


@dataclass(frozen=True)
class Registered:
    """There is a new lease. The node's record and its claim to lead are written on it."""


@dataclass(frozen=True)
class LeaseEnded:
    """The lease was not kept alive, or the store forgot it."""


@dataclass(frozen=True)
class Read:
    """All entries that this node follows, as they are now. The node will see all changes after them."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Saw:
    """An entry that this node follows has changed."""

    change: Change


@dataclass(frozen=True)
class Wrote:
    """The write with this number took place."""

    number: int
    revision: int


@dataclass(frozen=True)
class WriteRefused:
    """The write with this number did not take place and never will, because something that it expects is not so."""

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

# ---- what a node asks for


@dataclass(frozen=True)
class Register:
    """Get a new lease."""


@dataclass(frozen=True)
class Follow:
    """Read and watch the head, or with `everything` all keys of the run, in place of what was followed before."""

    everything: bool


@dataclass(frozen=True)
class Write:
    """Write entries, all or none, if all keys in `compare` are at their revisions. Tell whether that took place.

    `leased`: the entries are written on the node's lease. Entries without a lease are written together with FENCE,
    which is on it. So they are refused after a store has lost everything: revisions may then be as they were before,
    but the lease is gone. A node asks for no second write of a key while the first one is under way.
    """

    number: int
    entries: tuple[tuple[str, str], ...]
    compare: dict[str, int]
    leased: bool

    def puts(self, lease: int) -> list[Put]:
        """Return the write as a store takes it."""
        puts = [Put(key, value, lease if self.leased else 0) for key, value in self.entries]
        return puts if self.leased else [*puts, Put(FENCE, "", lease)]


@dataclass(frozen=True)
class Carry:
    """Carry out an action for this node's workers."""

    action: protocol.Action


@dataclass(frozen=True)
class Deliver:
    """Deliver the values that members have set, of generations that are still of interest. Some of these values may
    have been delivered before."""

    values: Values


@dataclass(frozen=True)
class Excluded:
    """This node cannot take part in the run, because it differs from the other nodes."""

    reason: str


@dataclass(frozen=True)
class Damaged:
    """No node wrote this value in the store. It is ignored, and the node that owns it writes it anew."""

    key: str
    why: str


Output = Register | Follow | Write | Carry | Deliver | Excluded | Damaged
T = TypeVar("T")

# ---- state


@dataclass(frozen=True)
class NodeState:
    """All that one node knows. No mapping in it is ever changed in place."""

    own: OwnRecord  # its record for the other nodes
    limits: Limits
    registered: bool = False  # there is a lease
    has_read: bool = False  # the node has read what is decided; before that it writes nothing
    leader_known: bool = False
    led_by: str = ""  # the key of the node that leads, as far as known
    unled_at: int = 0  # the revision of a leader's key that names no node on a lease; 0: there is no such key
    decision: Entry | None = None  # the last one that could be read
    decision_at: int = 0  # the revision of the decision's key now, readable or not
    origin: str = ""  # of the decision that was heeded last
    origin_in: int = -1  # the session in which it was read
    heeded: int | None = None  # the last action that was carried out; None: the node has not read what is decided
    damaged: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # unreadable: at which revision, and why
    writes_asked: int = 0  # ever; a write's number
    asked: Mapping[int, str] = field(default_factory=dict)  # writes that are under way: number → first key
    deciding: str = ""  # the decision that is being written
    returned_at: float | None = None  # when the last lease ended
    lead: Lead | None = None  # if this node leads

    @property
    def led(self) -> protocol.State | None:
        """The protocol's state, if this node leads."""
        return self.lead.state if self.lead is not None else None


Step = tuple[NodeState, tuple[Output, ...]]


def begin(name: str, limits: Limits, places: int, known: Known, about: Mapping[str, Any]) -> NodeState:
    """Return the state of a node that has just come. `name`: of the node, never used by another one. `places`: how many
    workers it wants to have. `about`: entries that all nodes of a run must have in common, as names and values. A node
    whose entries differ is excluded."""
    return NodeState(OwnRecord(name, places, known, about, str(about.get(HISTORY, ""))), limits)


def step(state: NodeState, inputs: Iterable[Input], now: float) -> Step:
    """Apply inputs that became known together. The node decides and writes once, with all of them in view. Late,
    repeated and unknown input is ignored."""
    before = state
    outputs: tuple[Output, ...] = ()
    for told in inputs:
        state, more = _apply(state, told, now)
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
        """Return what the node asks for first."""
        return (Register(),)

    def take(self, told: Input, now: float) -> tuple[Output, ...]:
        """Return what follows from an input."""
        return self.take_all([told], now)

    def take_all(self, inputs: Iterable[Input], now: float) -> tuple[Output, ...]:
        """Return what follows from all of these inputs together."""
        self.state, outputs = step(self.state, inputs, now)
        return outputs


def _apply(state: NodeState, told: Input, now: float) -> Step:
    """Return the node after one input, and what it asks for."""
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
            if late and change.key == LEADER:  # a change from before this node's own claim
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
    """Come back under a new key with the workers that live. The record is gone, and every claim with it."""
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
        return state, (*outputs, Follow(everything=True))  # this reading of the head was asked for before the claim
    records: dict[str, dict[str, Any] | None] = {}
    for key, entry in entries_of_nodes.items():
        state, records[key] = _readable(state, entry, read_record)
    state, decision = _last_decision(state, by_key.get(STATE))
    assert state.lead is not None
    return replace(state, lead=state.lead.read_all(records, decision, now)), outputs


def _last_decision(state: NodeState, kept: Entry | None) -> tuple[NodeState, dict[str, Any] | None]:
    """Return the decision to go on from, with the leader's state that was written together with it. Return None if
    there is none, or if one of the two cannot be read. The leader then begins as if the store had lost everything."""
    if state.decision is None or kept is None or kept.revision != state.decision.revision:
        return state, None
    state, read = _readable(state, kept, read_state)
    assert state.decision is not None
    return state, None if read is None else read_decision(state.decision.value) | {"state": read}


def _readable(state: NodeState, entry: Entry, read: Callable[[str], T]) -> tuple[NodeState, T | None]:
    """Return what a value says. If it cannot be read, return None and note the damage."""
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
        return _step_down(state)  # the key is gone, or another claim stands there
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
    """Go on although the decision in the store cannot be read. A leader still has it in memory, and publishes it again.
    If no node leads, the next leader begins with what the nodes' records say."""
    return _publish_again(replace(state, own=state.own.write_anew(), heeded=state.heeded or 0))


def _publish_again(state: NodeState) -> NodeState:
    return state if state.lead is None else replace(state, lead=state.lead.publish_again())


def _answered(state: NodeState, number: int) -> tuple[NodeState, str]:
    """Return the key of a write whose outcome the store has told; "" if the node no longer waits for it."""
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
    if key == LEADER:  # another leader may have come and gone meanwhile
        return replace(state, leader_known=False), (Follow(everything=False),)
    if key in (DECISION, VALUES) and state.lead is not None:
        return _step_down(state)
    return state, _look_again(state) if key == DECISION else ()


def _look_again(state: NodeState) -> tuple[Output, ...]:
    """Read the head again if this node holds the leader's key and does not lead yet. It may begin now, because the
    last decision is known."""
    return (Follow(everything=False),) if state.lead is None and state.led_by == state.own.key else ()


# ---- what is decided


def _heed(state: NodeState, decision: dict[str, Any], now: float) -> Step:
    """Carry out what is new in a decision. A node that has just come to the run carries out nothing that was decided
    before, except the end of the job."""
    if state.heeded is None:
        state = replace(state, origin=decision["origin"], heeded=decision["count"])
        if decision["finished"] is not None:
            done = protocol.Done(decision["finished"])
            return replace(state, own=replace(state.own, ended=done)), (Carry(done),)
    if decision["origin"] != state.origin:  # the store had lost everything, or its decision was unreadable
        known_to_the_store = state.origin_in == state.own.session
        state = replace(state, origin=decision["origin"], heeded=0)
        if known_to_the_store:  # it still has this node's record, which lacks what the old leader had read
            return _begin_again(state, now)
    state = replace(state, origin_in=state.own.session, own=state.own.heed_decision(decision))
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
            break  # later actions are of a job that was launched again, without this node
        heeded = number
        if missed and isinstance(action, protocol.Announce):  # an action that was missed may be an urgent one
            action = protocol.Announce(replace(action.generation, urgent=True))
        if isinstance(action, protocol.Done | protocol.Poison | protocol.Stop):
            own = own.end(action)
        outputs += (Carry(action),)
    return replace(state, heeded=heeded, own=own), outputs


# ---- leading


def _lead(state: NodeState, revision: int) -> Step:
    """Begin to lead. The node hears of its claim twice, as an answer and as a change, but begins once. It begins only
    after it knows the outcome of its earlier write of a decision."""
    if state.lead is not None or DECISION in state.asked.values():
        return state, ()
    patient_until = None if state.returned_at is None else state.returned_at + PATIENCE_S
    lead = Lead(state.own.key, revision, state.limits, patient_until, _new_origin(state, revision))
    return replace(state, lead=lead), (Follow(everything=True),)


def _new_origin(state: NodeState, revision: int) -> str:
    """Return a name that no decision's origin has had. The name needs a number after the claim's: if a decision has
    become unreadable, a node may begin with nothing a second time on the same claim."""
    origin = f"{state.own.key}@{revision}"
    return f"{origin}.{state.writes_asked}" if state.origin.startswith(origin) else origin


def _step_down(state: NodeState) -> Step:
    """Lead no longer, and follow the head alone."""
    return replace(state, lead=None), (Follow(everything=False),)


# ---- what is written


def _writes(state: NodeState, now: float) -> Step:
    """Write what is new: the node's record, its claim if no node leads, and its decision if it leads."""
    if not state.registered or not state.has_read:
        return state, ()
    own = state.own
    outputs: tuple[Output, ...] = ()
    if own.writing is None and own.written < own.changes:
        unwritten = {own.key: 0} if own.written < 0 else {}  # the key is new once; later the lease guards it
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
    """Publish what is new: a decision, on top of the one before it, and the addresses."""
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
