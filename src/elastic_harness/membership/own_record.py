"""The record in which one node tells the others about itself, in the store. Frozen: each method returns the record
after a change.

The record names the workers that live. It holds every event until a decision says that the leader has read it. When the
node's lease ends, the record vanishes. The node then begins another one, under a new key, and tells again all events
that may not have been read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_harness.membership import protocol
from elastic_harness.membership.codec import encode, to_text
from elastic_harness.membership.lead import HISTORY
from elastic_harness.membership.records import Known

NODES = "run/node/"
GENERATIONS_OFFERED = 2  # a planned generation may be announced while members still connect in the one before


@dataclass(frozen=True)
class OwnRecord:
    """A node's record, and how much of it stands in the store. No mapping in it is ever changed in place."""

    name: str  # of the node; no other node ever has it
    places: int  # workers that the node wants to have
    known: Known
    about: Mapping[str, Any]  # entries that all nodes of a run must have in common
    history: str = ""  # the history of training that this node has a part in
    session: int = 0  # counts the records that this node began
    members: tuple[str, ...] = ()  # its living workers, in order of age
    ever: frozenset[str] = frozenset()  # its workers that were in a generation
    veterans: frozenset[str] = frozenset()  # … in one that was formed: they have, or are about to have, the state
    leaves: bool = False  # all its workers are to leave at a step boundary
    ended: protocol.Action | None = None  # how the job ended
    events: tuple[tuple[int, protocol.Event], ...] = ()  # numbered; without those that a decision says were read
    last: int = 0  # the number of the newest event
    offered: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # values of members, by generation
    changes: int = 0  # of the record, so far
    written: int = -1  # how many changes the store's record holds; -1: there is no record
    writing: int | None = None  # how many it will hold after the write that is under way; None: there is no such write

    @property
    def key(self) -> str:
        return f"{NODES}{self.name}.{self.session}"

    @property
    def text(self) -> str:
        """The record as it is written into the store."""
        record = {
            "about": self.about,
            "places": self.places,
            "members": self.members,
            "veterans": [member for member in self.members if member in self.veterans],
            "known": vars(self.known),
            "events": [[number, encode(event)] for number, event in self.events],
            "values": self.offered,
        }
        return to_text(record)

    # ---- what happens on the node

    def happened(self, event: protocol.Event) -> OwnRecord:
        """Tell an event. Only the first commit and the first saved checkpoint are told. After the end of the job
        nothing is told."""
        known, members = self.known, self.members
        if self.ended is not None:
            return self
        match event:
            case protocol.Committed() if known.born:
                return self
            case protocol.Committed():
                known = replace(known, born=True)
            case protocol.Saved() if known.saved:
                return self
            case protocol.Saved():
                known = replace(known, saved=True)
            case protocol.Ready(member) if member not in members:
                members = (*members, member)
            case protocol.Lost(member):
                members = tuple(m for m in members if m != member)
        last = self.last + 1
        events = (*self.events, (last, event))
        return replace(self, known=known, members=members, last=last, events=events, changes=self.changes + 1)

    def offer(self, generation: int, key: str, value: str) -> OwnRecord:
        """Tell a value that a member has set. Values of older generations are dropped."""
        offered = {**self.offered, generation: {**self.offered.get(generation, {}), key: value}}
        newest = sorted(offered)[-GENERATIONS_OFFERED:]
        offered = {number: values for number, values in offered.items() if number in newest}
        return replace(self, offered=offered, changes=self.changes + 1)

    def scale(self, places: int) -> OwnRecord:
        """Want another number of workers."""
        return replace(self, places=places, changes=self.changes + 1)

    def leave(self) -> OwnRecord:
        """Want no workers any more, and tell that all of them leave."""
        record = replace(self, leaves=True, places=0, changes=self.changes + 1)
        for member in self.members:
            record = record.happened(protocol.Leaving(member))
        return record

    def describe(self, about: Mapping[str, Any]) -> OwnRecord:
        """Tell more entries that all nodes must have in common."""
        return replace(self, about={**self.about, **about}, changes=self.changes + 1)

    # ---- what is decided

    def heed_decision(self, decision: Mapping[str, Any]) -> OwnRecord:
        """Drop the events that a decision says were read, and learn what the decision knows."""
        about, history = self.about, self.history
        if not history and HISTORY in decision["about"] and decision["formed"]:
            history = decision["about"][HISTORY]
            about = {**about, HISTORY: history}
        taken = decision["taken"].get(self.key, 0)
        events = tuple((number, event) for number, event in self.events if number > taken)
        known = self.known.and_also(Known(**decision["known"]))
        return replace(self, about=about, history=history, events=events, known=known)

    def end(self, action: protocol.Action) -> OwnRecord:
        """Note that the job is over. Others may begin it again while this node's workers end: it offers no places."""
        record = replace(self, places=0, changes=self.changes + 1, events=())
        for member in self.members:
            record = record.happened(protocol.Lost(member))
        return replace(record, ended=action)

    def take_part(self, members: Sequence[str], *, formed: bool) -> OwnRecord:
        """Remember which of the node's workers are in the newest generation."""
        ours = {member for member in members if member in self.members}
        veterans = self.veterans | ours if formed else self.veterans
        return replace(self, ever=self.ever | ours, veterans=veterans)

    def leave_behind(self, members: Sequence[str]) -> OwnRecord:
        """Drop the workers without which the other nodes went on, before this node comes back. Those workers will
        leave, and must not be taken for new ones. The caller keeps them while the job is paused: then they wait too,
        and may hold the state."""
        gone = {m for m in self.members if m in self.ever and m not in members}
        events = tuple(e for e in self.events if not (isinstance(e[1], protocol.Ready) and e[1].member in gone))
        return replace(self, members=tuple(m for m in self.members if m not in gone), events=events)

    # ---- the store

    def write(self) -> OwnRecord:
        """Note that a write of the record, as it is now, was asked for."""
        return replace(self, writing=self.changes)

    def wrote(self) -> OwnRecord:
        """Note that the write took place."""
        return self if self.writing is None else replace(self, written=self.writing, writing=None)

    def write_anew(self) -> OwnRecord:
        """Have the record written once more, because it cannot be read in the store."""
        return replace(self, changes=self.changes + 1)

    def begin_again(self) -> OwnRecord:
        """Begin another record, because the last one is gone. It names the workers that live, and tells again all
        events that may not have been read. Every event may safely be told twice."""
        unread = [event for _, event in self.events if not isinstance(event, protocol.Ready)]
        leaving = map(protocol.Leaving, self.members if self.leaves else ())
        events = [*map(protocol.Ready, self.members), *leaving, *unread]
        record = replace(self, session=self.session + 1, events=(), last=0, written=-1, writing=None)
        for event in events:
            record = record.happened(event)
        return record
