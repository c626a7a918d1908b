"""The work of the node that leads: it reads the records of all nodes, steps the protocol, and says what to publish.

Frozen: each method returns the lead after a change. No I/O, no clock, no randomness. A decision, with the state beside
it, holds everything that the next leader needs: the protocol's state, and how far each record was read. The next leader
gathers the addresses anew from the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elastic_harness.membership import protocol
from elastic_harness.membership.codec import decode, encode
from elastic_harness.membership.records import Known, Values
from elastic_harness.membership.types import Limits, node_of
from elastic_harness.runs.fingerprints import fits

ACTIONS_KEPT = 32  # in a decision
GENERATIONS_KEPT = 2  # each names all members, twice; a node that missed more takes these for urgent
HISTORY = "history"  # an entry that all nodes must have in common: made when a run begins, kept in their folders
PER_LAUNCH = ("training.max_steps",)  # entries that may change when all nodes are launched again
MISSED_MAX = 1000  # generations that a node which stays away may know of after a store's loss: no number is used twice
PATIENCE_S = 3.0  # other nodes have so long to come, or to come back after an outage that ended all leases
UNPUBLISHED_MAX = 64  # a decision is due when so many events of a record were read: it lets the node drop them

Record = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class News:
    """The part of a decision that is compared with the one before: if it is the same, there is nothing to publish."""

    count: int = 0  # of all actions ever
    excluded: Mapping[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    known: Known = Known()  # noqa: RUF009  (immutable)


@dataclass(frozen=True)
class Lead:
    """All that the leading node knows. No mapping in it is ever changed in place.

    `about` is what all nodes must have in common. The last decision says it, if a step was committed or a generation
    stands formed; the first record that names an entry says the rest. A node that differs is excluded: nothing in its
    record counts."""

    key: str  # of the leading node's record
    revision: int  # of the leader's key
    limits: Limits
    patient_until: float | None  # before that the absence of a record says nothing; None: at once, given a decision
    origin: str  # where the numbers of actions began: of the decision that was taken over, or this leader's own
    state: protocol.State | None = None  # of the protocol; None until everything was read
    missed: bool = False  # members without a record were taken for lost
    all_read: bool = False
    records: Mapping[str, Record] = field(default_factory=dict)  # by key; without those that do not count
    known: Known = Known()  # noqa: RUF009  (immutable)  # by any node whose record was ever seen
    about: Mapping[str, Any] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)  # keys of nodes that differ, and why
    damaged: Mapping[str, float | None] = field(default_factory=dict)  # unreadable records: since when that is told
    given_up: frozenset[str] = frozenset()  # unreadable records that were not written anew in time
    wanted: int = 0  # workers, by all records
    taken: Mapping[str, int] = field(default_factory=dict)  # how far each record was read
    events: tuple[protocol.Event, ...] = ()  # read, not yet given to the protocol
    settled: protocol.State | None = None  # the state in which nothing follows from time alone
    actions: tuple[tuple[int, Any], ...] = ()  # the newest, numbered and encoded
    count: int = 0  # of all actions ever
    published: News = News()
    published_taken: Mapping[str, int] = field(default_factory=dict)  # `taken` as the last decision has it
    overdue: bool = False  # a decision is due although nothing follows: for example, a record holds many read events
    told_values: tuple[Values, ...] = ()  # by records, not yet among `values`
    values: Values = field(default_factory=dict)
    values_published: Mapping[int, int] = field(default_factory=dict)  # how many of each generation are
    values_waiting: bool = False  # some are not published yet, because more of them may come
    values_due: bool = False  # they have waited from one tick to the next: publish them

    # ---- what the records say

    def read_all(self, records: Mapping[str, Record | None], decision: Mapping[str, Any] | None, now: float) -> Lead:
        """Take all records as they are, and the last decision. A record is None if it cannot be read."""
        lead = self
        if self.state is None and decision is not None:
            kept = decision["about"] if decision["known"]["born"] or decision["formed"] else {}
            lead = replace(lead, about={name: value for name, value in kept.items() if name not in PER_LAUNCH})
        followed = {*self.records, *self.excluded, *self.damaged, *self.given_up}
        for key in sorted(followed - records.keys()):
            lead = lead.ended(key)
        for key in sorted(records, key=lambda key: key != self.key):  # the leader's own first: it says what is common
            record = records[key]
            lead = lead.unreadable(key) if record is None else lead.changed(key, record)
        lead = replace(lead, all_read=True)
        if lead.state is None and decision is not None:
            lead = lead._take_over(decision, now)
        if lead.patient_until is None:
            lead = replace(lead, patient_until=now if lead.state is not None else now + PATIENCE_S)
        return lead.tick(now)

    def changed(self, key: str, record: Record) -> Lead:
        """Take a node's record that is new, or has changed."""
        lead = self._readable(key, record)
        if key in lead.excluded:
            return lead
        about, why = _in_common(lead.about, record["about"])
        if why:
            lead = replace(lead, about=about, excluded={**lead.excluded, key: why})
            return lead._forget(key)
        before = lead.records.get(key)
        lead = replace(
            lead,
            about=about,
            known=lead.known.and_also(Known(**record["known"])),
            wanted=lead.wanted + record["places"] - (before["places"] if before is not None else 0),
            records={**lead.records, key: record},
            told_values=(*lead.told_values, record["values"]) if record["values"] else lead.told_values,
        )._follow([key])
        if before is not None:  # events tell it too, but a node may have dropped them; its record is always true
            lead = lead._lose(member for member in before["members"] if member not in record["members"])
        return lead

    def _readable(self, key: str, record: Record) -> Lead:
        lead = replace(self, damaged=_without(self.damaged, key)) if key in self.damaged else self
        if key in self.given_up:
            ready = map(protocol.Ready, record["members"])
            lead = replace(lead, given_up=self.given_up - {key}, events=(*self.events, *ready))
        return lead

    def unreadable(self, key: str) -> Lead:
        """Note that a node's record cannot be read any more. Decisions tell that node so until it writes the record
        anew. For `PATIENCE_S` the last readable record still counts. After that the node counts as gone."""
        if key in self.given_up or key in self.damaged:
            return self
        return replace(self, damaged={**self.damaged, key: None})

    def _give_up(self, key: str) -> Lead:
        """Count a node as gone whose record stays unreadable, and its workers as lost."""
        lead = replace(self, damaged=_without(self.damaged, key), given_up=self.given_up | {key})._forget(key)
        gone = (member for member in lead._missing() if node_of(member) == _node_at(key))
        return replace(lead, events=(*lead.events, *map(protocol.Lost, gone)))

    def _missing(self) -> list[str]:
        """Return the workers that the protocol takes for ready, but that no record names."""
        living = {member for record in self.records.values() for member in record["members"]}
        return [] if self.state is None else [member for member in self.state.ready if member not in living]

    def publish_again(self) -> Lead:
        """Publish everything once more: what was published is gone from the store, or cannot be read there."""
        return replace(self, overdue=True, values_published={})

    def ended(self, key: str) -> Lead:
        """Note that a node is gone, and its workers with it."""
        lead = replace(
            self,
            excluded=_without(self.excluded, key),
            damaged=_without(self.damaged, key),
            given_up=self.given_up - {key},
        )
        return lead._forget(key)

    def _forget(self, key: str) -> Lead:
        """Let nothing count any more that this record says."""
        lead = replace(self, records=_without(self.records, key), taken=_without(self.taken, key))
        record = self.records.get(key)
        if record is None:
            return lead
        state = None if self.state is None else _perhaps_born(self.state)
        return replace(lead, wanted=self.wanted - record["places"], state=state)._lose(record["members"])

    def _lose(self, members: Iterable[str]) -> Lead:
        """Tell the protocol that these workers are lost: no record names them any more."""
        lost = tuple(map(protocol.Lost, members))
        return self if self.state is None or not lost else replace(self, events=(*self.events, *lost))

    def tick(self, now: float) -> Lead:
        """Do what is due now: begin, take members without a record for lost, tell the protocol the time."""
        lead = self if self.values_due == self.values_waiting else replace(self, values_due=self.values_waiting)
        if not self.all_read or self.patient_until is None:
            return lead
        if self.state is None and now >= self.patient_until:
            lead = lead._begin()
        lead = lead._wait_for_damaged(now).step(now)
        if lead.state is not None and now >= self.patient_until and not lead.missed:
            lead = replace(lead, missed=True)
            unread = set(map(_node_at, lead.damaged))  # these nodes may be alive
            lost = [m for m in lead._missing() if node_of(m) not in unread]
            lead = lead._step([*map(protocol.Lost, lost), *lead._scaled()], now)
        if lead.state is not None and (lead.state is not lead.settled or protocol.timed(lead.state)):
            count = lead.count
            lead = lead._step([protocol.Tick()], now)
            lead = replace(lead, settled=lead.state if lead.count == count else None)
        return lead

    def _wait_for_damaged(self, now: float) -> Lead:
        lead = self
        for key in [key for key in self.damaged if key in self.published.damaged]:
            since = self.damaged[key]
            if since is None:
                lead = replace(lead, damaged={**lead.damaged, key: now})
            elif now - since > PATIENCE_S:  # no node owns it: on the lease of a lost node it would have vanished
                lead = lead._give_up(key)
        return lead

    # ---- what follows

    def step(self, now: float) -> Lead:
        """Give the protocol all events that were read. It decides once, with all of them in view."""
        lead = replace(self, events=()) if self.events else self
        lead = lead._step([*self._scaled(), *self.events], now)
        return lead._step([protocol.StopAsked("all nodes were asked to stop")], now) if lead._all_leave() else lead

    def news(self, now: float) -> tuple[Lead, dict[str, Any] | None]:
        """Return the decision to publish, None if there is nothing new."""
        lead = self.step(now)
        if lead.state is None:
            return lead, None
        damaged = tuple(sorted(lead.given_up.union(lead.damaged))) if lead.given_up or lead.damaged else ()
        news = News(lead.count, lead.excluded, damaged, Known.of(lead.state))
        if lead.published == news and not lead.overdue:
            return lead, None
        lead = replace(lead, published=news, published_taken=lead.taken, overdue=False)
        return lead, lead._decision(now)

    def _decision(self, now: float) -> dict[str, Any]:
        state = self.state
        assert state is not None
        generation = state.generation
        return {
            "origin": self.origin,
            "now": now,
            "state": encode(state),
            "known": vars(self.published.known),
            "about": self.about,
            "generation": generation.number if generation is not None else None,
            "members": list(generation.members) if generation is not None else None,
            "formed": state.formed,
            "paused": state.paused,
            "finished": next((action["version"] for _, action in self.actions if action["is"] == "Done"), None),
            "excluded": self.excluded,
            "damaged": self.published.damaged,
            "taken": self.taken,
            "count": self.count,
            "actions": self.actions,
        }

    def new_values(self) -> tuple[Lead, Values | None]:
        """Return the addresses to publish: all, as soon as every member of the newest generation has given one, or else
        those that are there at the next tick."""
        state = self.state
        if state is None or state.generation is None:
            return self, None
        generation = state.generation
        current = {generation.number}
        if not generation.urgent and state.previous is not None:
            current.add(state.previous.number)  # its members may still be connecting
        lead = self._merge_values(current)
        counts = {number: len(values) for number, values in lead.values.items()}
        if all(count <= lead.values_published.get(number, 0) for number, count in counts.items()):
            return lead, None
        if counts.get(generation.number, 0) < len(generation.members) and not lead.values_due:
            return (lead if lead.values_waiting else replace(lead, values_waiting=True)), None
        return replace(lead, values_published=counts, values_waiting=False, values_due=False), lead.values

    def _merge_values(self, current: set[int]) -> Lead:
        """Add the values that records have told, and drop those of other generations than these."""
        if not self.told_values and self.values.keys() <= current:
            return self
        values: dict[int, dict[str, str]] = {}
        for told in (self.values, *self.told_values):
            for number, by_key in told.items():
                values.setdefault(int(number), {}).update(by_key)
        values = {number: by_key for number, by_key in values.items() if number in current}
        return replace(self, values=values, told_values=())

    # ---- how it begins

    def _begin(self) -> Lead:
        """Begin without a decision: the run is new, or the store has lost everything. Other nodes may know more than
        this one, and have had the time to come."""
        known = self.known
        if HISTORY in self.about:  # some node was in a formed generation, so a step may have been committed
            known = replace(known, number=known.number + MISSED_MAX, born=True)
        return replace(self, about=_with_history(self.about, self.origin))._begin_with(known)

    def _begin_another(self, known: Known, now: float) -> Lead:
        """Begin a job that had ended and was launched again. Only what is known outlives its end."""
        ready = (protocol.Ready(m) for record in self.records.values() for m in record["members"])
        return replace(self, actions=(), events=(*self.events, *ready))._begin_with(known).step(now)

    def _begin_with(self, known: Known) -> Lead:
        """Make a state without a generation. Nobody was in one, so nobody can be missing."""
        veterans = tuple(member for record in self.records.values() for member in record["veterans"])
        state = protocol.State(self.limits, veterans=veterans, **vars(known))
        return replace(self, state=state, missed=True)._follow(list(self.records))

    def _take_over(self, decision: Mapping[str, Any], now: float) -> Lead:
        """Go on from the last decision."""
        lead = replace(
            self,
            origin=decision["origin"],
            about=_with_history(self.about, decision["origin"]),
            taken=decision["taken"],
            published_taken=decision["taken"],
            actions=tuple((number, action) for number, action in decision["actions"]),
            count=decision["count"],
            published=News(decision["count"], {}, (), Known(**decision["known"])),
        )
        state: protocol.State = decode(decision["state"])
        if state.done:
            return lead._begin_another(Known.of(_perhaps_born(state)), now)
        state = _perhaps_born(_later(state, now - decision["now"]))
        return replace(lead, state=state)._follow(list(lead.records))

    def _follow(self, keys: Iterable[str]) -> Lead:
        """Read what is new in these records."""
        if self.state is None:
            return self
        known, taken = Known.of(self.state), dict(self.taken)
        events: list[protocol.Event] = []
        overdue = self.overdue
        for key in keys:
            record = self.records[key]
            more = Known(**record["known"])
            if self.state.ever_formed:  # this run's own history counts, not that of a node
                more = replace(more, lineage=known.lineage, from_step=known.from_step)
            known = known.and_also(more)
            for number, event in record["events"]:
                if number > taken.get(key, 0):
                    taken[key] = number
                    events.append(decode(event))
            overdue |= taken.get(key, 0) - self.published_taken.get(key, 0) >= UNPUBLISHED_MAX
        state = self.state if known == Known.of(self.state) else replace(self.state, **vars(known))
        if not events and state is self.state and overdue == self.overdue:
            return self
        return replace(self, state=state, taken=taken, events=(*self.events, *events), overdue=overdue)

    def _scaled(self) -> list[protocol.Event]:
        """Return how many workers are wanted now: all that the nodes have places for. The leader changes that only
        after it knows which nodes are gone. If it lowered the number earlier, it would evict workers that are still
        alive."""
        if self.state is None or not self._counted():
            return []
        limits = self.state.limits
        unchanged = max(limits.min_workers, min(self.wanted, limits.max_workers)) == limits.target
        return [] if unchanged else [protocol.Scaled(self.wanted)]

    def _counted(self) -> bool:
        """Return whether the leader knows what all nodes want that are there."""
        return self.missed and self.damaged.keys() <= self.records.keys()

    def _all_leave(self) -> bool:
        """Return whether no node wants workers any more. While one does, members that are told to go wait for its
        workers, as long as they can."""
        if self.state is None or self.state.done or self.state.generation is None or self.wanted or not self._counted():
            return False
        return self.state.formed and self.state.generation.member_set.issubset(self.state.leaving)

    def _step(self, events: Sequence[protocol.Event], now: float) -> Lead:
        if self.state is None or not events:
            return self
        state, new = protocol.steps(self.state, events, now)
        if not new:
            return replace(self, state=state)
        count = self.count + len(new)
        actions = (*self.actions, *enumerate(map(encode, new), self.count + 1))
        # A decision keeps the newest actions only: a node that has missed some notices it by their numbers.
        announced = [i for i, (_, action) in enumerate(actions) if action["is"] == "Announce"]
        older = announced[-GENERATIONS_KEPT] if len(announced) > GENERATIONS_KEPT else 0
        return replace(self, state=state, count=count, actions=actions[max(older, len(actions) - ACTIONS_KEPT) :])


def _in_common(run: Mapping[str, Any], node: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return what the run's nodes have in common, with what this node adds, and why it does not fit ("": it fits)."""
    both = dict(run)
    for name, value in node.items():
        if not fits(name, both.setdefault(name, value), value):
            if name == HISTORY:
                return both, "its run folder is that of another run, which was begun before or elsewhere"
            return both, f"{name} is {value!r} on this node and {both[name]!r} in the run"
    return both, ""


def _with_history(about: Mapping[str, Any], history: str) -> Mapping[str, Any]:
    return about if HISTORY in about else {**about, HISTORY: history}


def _later(state: protocol.State, seconds: float) -> protocol.State:
    """Return the state with all of its times moved to this node's clock, because no two nodes' clocks agree."""
    return replace(
        state,
        trouble_at=None if state.trouble_at is None else state.trouble_at + seconds,
        stateless_at=None if state.stateless_at is None else state.stateless_at + seconds,
        split_at=None if state.split_at is None else state.split_at + seconds,
        leaving_at=None if state.leaving_at is None else state.leaving_at + seconds,
        replaced_at=None if state.replaced_at is None else state.replaced_at + seconds,
        first_ready_at=state.first_ready_at + seconds,
        apart=tuple((at + seconds, a, b) for at, a, b in state.apart),
    )


def _perhaps_born(state: protocol.State) -> protocol.State:
    """Return the state as born, if any generation was ever formed. Members of which nothing is heard any more may have
    committed the first step, so nobody may begin at zero in silence."""
    return replace(state, born=state.born or state.ever_formed)


def _without(mapping: Mapping[str, T], key: str) -> Mapping[str, T]:
    return {each: value for each, value in mapping.items() if each != key} if key in mapping else mapping


def _node_at(key: str) -> str:
    """Return the name of the node whose record has this key."""
    return key.rpartition("/")[2].rpartition(".")[0]
