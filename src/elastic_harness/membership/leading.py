"""What the node that leads does: it reads the records of all nodes, steps the protocol, and says what to publish. Pure.

A decision, with the state beside it, holds everything that the next leader needs: the protocol's state, and how far
each record was read. Addresses it gathers anew from the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_harness.membership import leader
from elastic_harness.membership.codec import decode, encode
from elastic_harness.membership.records import Known, Values
from elastic_harness.membership.types import Limits, node_of
from elastic_harness.runs.fingerprints import fits

ACTIONS_KEPT = 32
GENERATIONS_KEPT = 2  # each names all members, twice; who missed more hears of the newest as an urgent one
HISTORY = "history"  # an entry of what nodes must have in common: made when a run begins, kept in their folders
PER_LAUNCH = ("training.max_steps",)  # entries that may change when all nodes are launched again
MISSED_MAX = 1000  # generations that all who come after a store's loss may have missed: no number is used twice
PATIENCE_S = 3.0  # so long other nodes may take to come, or to come back after an outage that ended all leases
UNPUBLISHED_MAX = 64  # events of a record read since the last decision, which stay in it until there is another


class Leading:
    """`state` is None until everything was read. `revision`: of the leader's key. `patient_until`: before that the
    absence of a record says nothing; None: at once, unless there is no decision.

    What nodes must have in common is that of the first record that tells of it, and once the run is born that of the
    decision. A node that differs is excluded: nothing in its record counts."""

    def __init__(self, key: str, revision: int, limits: Limits, patient_until: float | None) -> None:
        self.revision = revision
        self.state: leader.State | None = None
        self._key = key
        self._origin = f"{key}@{revision}"
        self._limits = limits
        self._patient_until = patient_until
        self._missed = False  # whether those without a record were taken for lost
        self._all_read = False
        self._records: dict[str, Mapping[str, Any]] = {}
        self._known = Known()  # by anybody whose record was ever seen
        self._about: dict[str, Any] = {}
        self._excluded: dict[str, str] = {}  # nodes, and why
        self._damaged: dict[str, float | None] = {}  # records that cannot be read, and since when that is published
        self._given_up: set[str] = set()  # those of them that were not written anew
        self._wanted = 0  # workers, by all records
        self._taken: dict[str, int] = {}  # how far each record was read
        self._events: list[leader.Event] = []  # read, not yet given to the protocol
        self._settled: leader.State | None = None  # in which nothing follows from time alone
        self._actions: list[tuple[int, Any]] = []  # encoded
        self._count = 0  # of all actions ever
        self._published: tuple[int, dict[str, str], list[str], Known] = (0, {}, [], Known())  # of the last decision
        self._published_taken: dict[str, int] = {}
        self._overdue = False  # whether a record holds many events that were read
        self._values: dict[int, dict[str, str]] = {}
        self._values_published: dict[int, int] = {}  # how many of them were
        self._values_waiting = self._values_due = False  # for more of them, and long enough

    # ---- what the records say

    def read_all(
        self, records: Mapping[str, Mapping[str, Any] | None], decision: Mapping[str, Any] | None, now: float
    ) -> None:
        """All records as they are, None for one that cannot be read; and the last decision."""
        if self.state is None and decision is not None:
            kept = decision["about"] if decision["known"]["born"] or decision["formed"] else {}
            self._about = {name: value for name, value in kept.items() if name not in PER_LAUNCH}
        followed = {*self._records, *self._excluded, *self._damaged, *self._given_up}
        for key in sorted(followed - records.keys()):
            self.ended(key)
        for key in sorted(records, key=lambda key: key != self._key):
            record = records[key]
            self.damaged(key) if record is None else self.changed(key, record)
        self._all_read = True
        if self.state is None and decision is not None:
            self._take_over(decision, now)
        if self._patient_until is None:
            self._patient_until = now if self.state is not None else now + PATIENCE_S
        self.tick(now)

    def changed(self, key: str, record: Mapping[str, Any]) -> None:
        """A node's record is new, or has changed."""
        self._damaged.pop(key, None)
        if key in self._given_up:
            self._given_up.discard(key)
            self._events += map(leader.Ready, record["members"])
        if key in self._excluded or self._differs(key, record["about"]):
            return
        self._known = self._known.and_also(Known(**record["known"]))
        before = self._records.get(key)
        self._wanted += record["places"] - (before["places"] if before is not None else 0)
        self._records[key] = record
        for number, values in record["values"].items():
            self._values.setdefault(int(number), {}).update(values)
        self._follow([key])
        if before is not None:  # events tell it too, but a node may let events go; its record cannot lie
            self._lose(member for member in before["members"] if member not in record["members"])

    def damaged(self, key: str) -> None:
        """A node's record cannot be read any more. That node is told so by decisions until it writes the record anew;
        for `PATIENCE_S` what it said before still counts, and after that the node counts as gone."""
        if key not in self._given_up:
            self._damaged.setdefault(key, None)

    def _give_up(self, key: str) -> None:
        del self._damaged[key]
        self._given_up.add(key)
        self._forget(key)
        self._events += (leader.Lost(member) for member in self._missing() if node_of(member) == _node_at(key))

    def _missing(self) -> list[str]:
        """The workers that are ready as far as the protocol knows, and of which no record tells."""
        living = {member for record in self._records.values() for member in record["members"]}
        return [] if self.state is None else [member for member in self.state.ready if member not in living]

    def publish_again(self) -> None:
        """What was published is gone from the store, or cannot be read there: all of it is new once more."""
        self._overdue = True
        self._values_published.clear()

    def _differs(self, key: str, about: Mapping[str, Any]) -> bool:
        for name, value in about.items():
            run = self._about.setdefault(name, value)
            if not fits(name, run, value):
                self._excluded[key] = f"{name} is {value!r} on this node and {run!r} in the run"
                if name == HISTORY:
                    self._excluded[key] = "its run folder is that of another run, which was begun before or elsewhere"
                self._forget(key)
                return True
        return False

    def ended(self, key: str) -> None:
        """A node is gone, and so are its workers."""
        self._excluded.pop(key, None)
        self._damaged.pop(key, None)
        self._given_up.discard(key)
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Nothing counts any more that this record says."""
        record = self._records.pop(key, None)
        self._taken.pop(key, None)
        if record is None:
            return
        self._wanted -= record["places"]
        if self.state is not None:
            self.state = _perhaps_born(self.state)
        self._lose(record["members"])

    def _lose(self, members: Iterable[str]) -> None:
        """No record names these workers any more."""
        if self.state is not None:
            self._events += map(leader.Lost, members)

    def tick(self, now: float) -> None:
        """Time passed."""
        self._values_due = self._values_waiting
        if not self._all_read or self._patient_until is None:
            return
        if self.state is None and now >= self._patient_until:
            self._begin()
        for key in [key for key in self._damaged if key in self._published[2]]:
            since = self._damaged[key]
            if since is None:
                self._damaged[key] = now
            elif now - since > PATIENCE_S:  # nobody's: it hangs on no lease, or it would have ended
                self._give_up(key)
        self.step(now)
        if self.state is not None and now >= self._patient_until and not self._missed:
            self._missed = True
            unread = set(map(_node_at, self._damaged))  # these nodes live, for all that is known
            lost = [m for m in self._missing() if node_of(m) not in unread]
            self._step([*map(leader.Lost, lost), *self._scaled()], now)
        if self.state is not None and (self.state is not self._settled or leader.timed(self.state)):
            count = self._count
            self._step([leader.Tick()], now)
            self._settled = self.state if self._count == count else None

    # ---- what follows

    def step(self, now: float) -> None:
        """Give the protocol all that was read: what becomes known together is decided on together."""
        events, self._events = self._events, []
        self._step([*self._scaled(), *events], now)

    def news(self, now: float) -> dict[str, Any] | None:
        """The decision to publish, if there is anything new."""
        self.step(now)
        damaged = sorted(self._given_up.union(self._damaged))
        if self.state is None:
            return None
        known = Known.of(self.state)
        news = (self._count, self._excluded, damaged, known)
        if self._published == news and not self._overdue:
            return None
        self._published, self._overdue = (self._count, dict(self._excluded), damaged, known), False
        self._published_taken = dict(self._taken)
        generation = self.state.generation
        return {
            "origin": self._origin,
            "now": now,
            "state": encode(self.state),
            "known": vars(known),
            "about": self._about,
            "generation": generation.number if generation is not None else None,
            "members": list(generation.members) if generation is not None else None,
            "formed": self.state.formed,
            "paused": self.state.paused,
            "finished": next((action["version"] for _, action in self._actions if action["is"] == "Done"), None),
            "excluded": self._excluded,
            "damaged": damaged,
            "taken": self._published_taken,
            "count": self._count,
            "actions": self._actions,
        }

    def new_values(self) -> Values | None:
        """The addresses to publish: as soon as every member of the newest generation has given one, or else what there
        is at the next tick."""
        generation = self.state.generation if self.state is not None else None
        if generation is None:
            return None
        current = {generation.number}
        if not generation.urgent and self.state is not None and self.state.previous is not None:
            current.add(self.state.previous.number)  # its members may still be connecting
        self._values = {number: values for number, values in self._values.items() if number in current}
        counts = {number: len(values) for number, values in self._values.items()}
        if all(count <= self._values_published.get(number, 0) for number, count in counts.items()):
            return None
        if counts.get(generation.number, 0) < len(generation.members) and not self._values_due:
            self._values_waiting = True
            return None
        self._values_published, self._values_waiting, self._values_due = counts, False, False
        return self._values

    def _begin(self) -> None:
        """There is no decision: a run begins, or the store has lost everything. Others may know more than this node,
        and have had the time to come."""
        known = self._known
        if HISTORY in self._about:  # somebody was in a generation: a step may have been committed
            known = replace(known, number=known.number + MISSED_MAX, born=True)
        self._about.setdefault(HISTORY, self._origin)
        self._begin_with(known)

    def _begin_another(self, known: Known, now: float) -> None:
        """The job had ended, and was launched again: nothing of it is left but what is known."""
        self._actions.clear()
        self._events += [leader.Ready(m) for record in self._records.values() for m in record["members"]]
        self._begin_with(known)
        self.step(now)

    def _begin_with(self, known: Known) -> None:
        """A state in which nobody has been in yet, and so nobody can be missing."""
        veterans = tuple(member for record in self._records.values() for member in record["veterans"])
        self.state = leader.State(self._limits, veterans=veterans, **vars(known))
        self._missed = True
        self._follow(list(self._records))

    def _take_over(self, decision: Mapping[str, Any], now: float) -> None:
        """Go on where the last decision was."""
        self._origin, self._taken = decision["origin"], dict(decision["taken"])
        self._about.setdefault(HISTORY, self._origin)
        self._published_taken = dict(self._taken)
        self._actions = [(number, action) for number, action in decision["actions"]]
        self._count = decision["count"]
        self._published = (self._count, {}, [], Known(**decision["known"]))
        state: leader.State = decode(decision["state"])
        if state.done:
            return self._begin_another(Known.of(_perhaps_born(state)), now)
        later = now - decision["now"]
        self.state = _perhaps_born(
            replace(
                state,
                trouble_at=None if state.trouble_at is None else state.trouble_at + later,
                stateless_at=None if state.stateless_at is None else state.stateless_at + later,
                first_ready_at=state.first_ready_at + later,
                apart=tuple((at + later, a, b) for at, a, b in state.apart),
            )
        )
        self._follow(list(self._records))

    def _follow(self, keys: Iterable[str]) -> None:
        """Read what is new in these records."""
        if self.state is None:
            return
        known = Known.of(self.state)
        for key in keys:
            record = self._records[key]
            more = Known(**record["known"])
            if self.state.ever_formed:  # what is going on now is this run's history
                more = replace(more, lineage=known.lineage, from_step=known.from_step)
            known = known.and_also(more)
            for number, event in record["events"]:
                if number > self._taken.get(key, 0):
                    self._taken[key] = number
                    self._events.append(decode(event))
            self._overdue |= self._taken.get(key, 0) - self._published_taken.get(key, 0) >= UNPUBLISHED_MAX
        if known != Known.of(self.state):
            self.state = replace(self.state, **vars(known))

    def _scaled(self) -> list[leader.Event]:
        """How many workers are wanted now: all that the nodes have places for. Not before it is known who is missing:
        of fewer that are wanted, living ones would have to go."""
        if self.state is None or not self._missed or not self._damaged.keys() <= self._records.keys():
            return []
        limits = self.state.limits
        unchanged = max(limits.min_workers, min(self._wanted, limits.max_workers)) == limits.target
        return [] if unchanged else [leader.Scaled(self._wanted)]

    def _step(self, events: Sequence[leader.Event], now: float) -> None:
        if self.state is None or not events:
            return
        self.state, actions = leader.steps(self.state, events, now)
        for action in actions:
            self._count += 1
            self._actions.append((self._count, encode(action)))
        announced = [i for i, (_, action) in enumerate(self._actions) if action["is"] == "Announce"]
        older = announced[-GENERATIONS_KEPT] if len(announced) > GENERATIONS_KEPT else 0
        del self._actions[: max(older, len(self._actions) - ACTIONS_KEPT)]


def _perhaps_born(state: leader.State) -> leader.State:
    """Members of whom nothing is heard any more may have committed the first step: nobody begins at zero in silence."""
    return replace(state, born=state.born or state.ever_formed)


def _node_at(key: str) -> str:
    """The name of the node whose record has this key."""
    return key.rpartition("/")[2].rpartition(".")[0]
