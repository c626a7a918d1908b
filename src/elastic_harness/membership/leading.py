"""What the node that leads does: it reads the records of all nodes, steps the protocol, and says what to publish. Pure.

A decision, with the state beside it, holds everything that the next leader needs: the protocol's state, and how far
each record was read. Addresses it gathers anew from the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_harness.membership import leader
from elastic_harness.membership.codec import decode, encode
from elastic_harness.membership.types import Limits

Values = Mapping[int, Mapping[str, str]]
"""What members have set for each other, by generation and key."""
ACTIONS_KEPT = 32
PATIENCE_S = 3.0  # so long other nodes may take to come, or to come back after an outage that ended all leases
UNPUBLISHED_MAX = 64  # events read since the last decision, which stay in the records until there is another


@dataclass(frozen=True)
class Known:
    """What outlives the store: the last generation number ever used, whether any step was ever committed, and which
    history the run is in."""

    number: int = 0
    born: bool = False
    lineage: int = 0
    from_step: int = 0

    @staticmethod
    def of(state: leader.State) -> Known:
        return Known(state.number, state.born, state.lineage, state.from_step)

    def and_also(self, other: Known) -> Known:
        """What both together know."""
        newest = max(self, other, key=lambda known: (known.lineage, known.from_step))
        return Known(max(self.number, other.number), self.born or other.born, newest.lineage, newest.from_step)


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
        self._about: dict[str, Any] = {}
        self._excluded: dict[str, str] = {}  # nodes, and why
        self._wanted = 0  # workers, by all records
        self._taken: dict[str, int] = {}  # how far each record was read
        self._actions: list[tuple[int, leader.Action]] = []
        self._count = 0  # of all actions ever
        self._read = 0  # events
        self._published = (0, 0, 0)  # count, read and number of the excluded of the last decision
        self._values: dict[int, dict[str, str]] = {}
        self._values_published: dict[int, int] = {}  # how many of them were
        self._values_waiting = self._values_due = False  # for more of them, and long enough

    # ---- what the records say

    def read_all(
        self, records: Mapping[str, Mapping[str, Any]], decision: Mapping[str, Any] | None, now: float
    ) -> None:
        """All records as they are, and the last decision."""
        if self.state is None and decision is not None:
            self._about = dict(decision["about"]) if decision["known"]["born"] else {}
        for key in [key for key in (*self._records, *self._excluded) if key not in records]:
            self.ended(key, now)
        for key in sorted(records, key=lambda key: key != self._key):
            self.changed(key, records[key], now)
        self._all_read = True
        if self.state is None and decision is not None:
            self._take_over(decision, now)
        if self._patient_until is None:
            self._patient_until = now if self.state is not None else now + PATIENCE_S
        self.tick(now)

    def changed(self, key: str, record: Mapping[str, Any], now: float) -> None:
        """A node's record is new, or has changed."""
        if key in self._excluded or self._differs(key, record["about"]):
            return
        self._wanted += record["places"] - (self._records[key]["places"] if key in self._records else 0)
        self._records[key] = record
        for number, values in record["values"].items():
            self._values.setdefault(int(number), {}).update(values)
        self._follow([key], now)

    def _differs(self, key: str, about: Mapping[str, Any]) -> bool:
        for name, value in about.items():
            run = self._about.setdefault(name, value)
            if value != run:
                self._excluded[key] = f"{name} is {value!r} on this node and {run!r} in the run"
                self._forget(key)
                return True
        return False

    def ended(self, key: str, now: float) -> None:
        """A node is gone, and so are its workers."""
        self._excluded.pop(key, None)
        record = self._forget(key)
        if record is not None and self.state is not None:
            self.state = _perhaps_born(self.state)
            self._step([*self._scaled(), *(leader.Lost(member) for member in record["members"])], now)

    def _forget(self, key: str) -> Mapping[str, Any] | None:
        record = self._records.pop(key, None)
        self._taken.pop(key, None)
        if record is not None:
            self._wanted -= record["places"]
        return record

    def tick(self, now: float) -> None:
        """Time passed."""
        self._values_due = self._values_waiting
        if not self._all_read or self._patient_until is None:
            return
        if self.state is None and now >= self._patient_until:
            self._begin(now)
        if self.state is not None and now >= self._patient_until and not self._missed:
            self._missed = True
            living = {member for record in self._records.values() for member in record["members"]}
            self._step([*(leader.Lost(m) for m in self.state.ready if m not in living), *self._scaled()], now)
        self._step([leader.Tick()], now)

    # ---- what follows

    def news(self, now: float) -> dict[str, Any] | None:
        """The decision to publish, if there is anything new."""
        count, read, excluded = self._published
        nothing_new = self._count == count and len(self._excluded) == excluded
        if self.state is None or (nothing_new and self._read - read < UNPUBLISHED_MAX):
            return None
        self._published = (self._count, self._read, len(self._excluded))
        generation = self.state.generation
        return {
            "origin": self._origin,
            "now": now,
            "state": encode(self.state),
            "known": vars(Known.of(self.state)),
            "about": self._about,
            "generation": generation.number if generation is not None else None,
            "members": list(generation.members) if generation is not None else None,
            "formed": self.state.formed,
            "paused": self.state.paused,
            "finished": next((a.version for _, a in self._actions if isinstance(a, leader.Done)), None),
            "excluded": self._excluded,
            "taken": dict(self._taken),
            "count": self._count,
            "actions": [[number, encode(action)] for number, action in self._actions],
        }

    def new_values(self) -> Values | None:
        """The addresses to publish: as soon as every member of the newest generation has given one, or else what there
        is at the next tick."""
        generation = self.state.generation if self.state is not None else None
        if generation is None:
            return None
        previous = self.state.previous if self.state is not None else None
        current = {generation.number, previous.number if previous is not None else 0}
        self._values = {number: values for number, values in self._values.items() if number in current}
        counts = {number: len(values) for number, values in self._values.items()}
        if all(count <= self._values_published.get(number, 0) for number, count in counts.items()):
            return None
        if counts.get(generation.number, 0) < len(generation.members) and not self._values_due:
            self._values_waiting = True
            return None
        self._values_published, self._values_waiting, self._values_due = counts, False, False
        return self._values

    def _begin(self, now: float) -> None:
        """There is no decision: a run begins, or the store has lost everything. Others may know more than this node,
        and have had the time to come."""
        self.state = leader.State(self._limits)
        self._follow(list(self._records), now)

    def _begin_another(self, known: Known, now: float) -> None:
        """The job had ended, and was launched again: nothing of it is left but what is known."""
        self.state = leader.State(
            self._limits, number=known.number, born=known.born, lineage=known.lineage, from_step=known.from_step
        )
        self._actions.clear()
        self._step([leader.Ready(m) for record in self._records.values() for m in record["members"]], now)
        self._follow(list(self._records), now)

    def _take_over(self, decision: Mapping[str, Any], now: float) -> None:
        """Go on where the last decision was."""
        self._origin, self._taken = decision["origin"], dict(decision["taken"])
        self._actions = [(number, decode(action)) for number, action in decision["actions"]]
        self._count = decision["count"]
        self._published = (self._count, 0, 0)
        state: leader.State = decode(decision["state"])
        if state.done:
            return self._begin_another(Known.of(_perhaps_born(state)), now)
        later = now - decision["now"]
        trouble_at = None if state.trouble_at is None else state.trouble_at + later
        apart = tuple((at + later, a, b) for at, a, b in state.apart)
        state = replace(state, first_ready_at=state.first_ready_at + later, trouble_at=trouble_at, apart=apart)
        self.state = _perhaps_born(state)
        self._follow(list(self._records), now)

    def _follow(self, keys: Iterable[str], now: float) -> None:
        """Give the protocol what is new in these records."""
        if self.state is None:
            return
        known, events = Known.of(self.state), []
        for key in keys:
            record = self._records[key]
            known = known.and_also(Known(**record["known"]))
            for number, event in record["events"]:
                if number > self._taken.get(key, 0):
                    self._taken[key] = number
                    self._read += 1
                    events.append(decode(event))
        self.state = replace(
            self.state, number=known.number, born=known.born, lineage=known.lineage, from_step=known.from_step
        )
        self._step([*self._scaled(), *events], now)

    def _scaled(self) -> list[leader.Event]:
        """How many workers are wanted now: all that the nodes have places for. Not before it is known who is missing:
        of fewer that are wanted, living ones would have to go."""
        assert self.state is not None
        if not self._missed:
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
            self._actions.append((self._count, action))
        del self._actions[:-ACTIONS_KEPT]


def _perhaps_born(state: leader.State) -> leader.State:
    """Members of whom nothing is heard any more may have committed the first step: nobody begins at zero in silence."""
    return replace(state, born=state.born or state.ever_formed)
