"""Planted mistakes of what nodes do to agree through a store, and of what they decide, for the simulator to find."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_harness.simulate.cli import Shape
from elastic_harness.simulate.nodes import KINDS
from mutants.patch import Patch


@dataclass(frozen=True)
class Planted(Patch):
    """`kinds`: faults of the world that show the mistake well. `spare_nodes`: see `Shape`."""

    kinds: tuple[str, ...] = KINDS
    spare_nodes: int = 0
    least_nodes: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(6, 3, 15, 8, self.spare_nodes, self.least_nodes, self.kinds)


PATCHES = [
    Planted(
        "events are let go once they are written",
        "self._written, self._revision, self._writing = self._writing, revision, None",
        "self._written, self._revision, self._writing = self._writing, revision, None\n            self._events = []",
    ),
    Planted(
        "actions of another origin are counted on",
        'self._origin, self._heeded = decision["origin"], 0',
        'self._origin = decision["origin"]',
    ),
    Planted(
        "what others know is not asked for",
        "known = known.and_also(more)",
        "known = known",
    ),
    Planted(
        "nobody is waited for",
        "if self.state is None and now >= self._patient_until:",
        "if self.state is None:",
        kinds=("store loses all", "kill node", "pause node"),
    ),
    Planted(
        "the loss of a node is nobody's business",
        'self._lose(record["members"])',
        "pass",
    ),
    Planted(
        "only a node's last record tells who is lost with it",
        'self._lose(member for member in before["members"] if member not in record["members"])',
        "pass",
        (("if self.ended is not None:\n                break", "if False:\n                break"),),
        kinds=("stop all", "cut one way"),
    ),
    Planted(
        "a leader that begins counts its own places only",
        "        self._missed = True\n        self._follow(list(self._records))",
        "        self._follow(list(self._records))",
        kinds=("store loses all", "kill node", "kill half"),
    ),
    Planted(
        "whoever is first goes on, with or without the state",
        "key=lambda m: m not in view.veterans",
        "key=lambda m: False",
        kinds=("store loses all", "kill node", "kill half"),
        spare_nodes=1,
    ),
    Planted(
        "nodes that died with the leader are not missed",
        "self._step([*map(leader.Lost, lost), *self._scaled()], now)",
        "self._step(self._scaled(), now)",
    ),
    Planted(
        "any checkpoint will do",
        "    return of >= lineage or version <= from_step\n",
        "    return True\n",
        kinds=("kill half", "cut from store", "kill node", "kill all", "cut from nodes"),
    ),
    Planted(
        "the first member restores, whoever has the checkpoint",
        "source_member = next(m for m in members if offers.get(m) == version)",
        "source_member = members[0]",
        kinds=("kill all", "kill half", "kill node"),
    ),
    Planted(
        "nodes that are cut from each other go on together",
        "    if not view.apart:\n        return members\n",
        "    return members\n",
        kinds=("cut from nodes",),
    ),
    Planted(
        "after a pause things go on as they were",
        'reform = reform or (current is not None and state.paused != "")',
        "reform = reform",
        kinds=("cut from nodes", "kill worker"),
        least_nodes=3,
    ),
    Planted(
        "who had finished counts, though nobody knows in which generation",
        "ending = bool(view.finished) and view.current is not None",
        "ending = bool(view.finished)",
        kinds=("store loses all", "kill worker"),
    ),
    Planted(
        "what was not read is forgotten with the lease",
        "for event in [*map(leader.Ready, self._members), *leaving, *unread]:",
        "for event in [*map(leader.Ready, self._members), *leaving]:",
        kinds=("cut all from store", "kill worker"),
    ),
    Planted(
        "a node comes back under its old key",
        "self._session += 1",
        "self._session += 0",
        kinds=("cut all from store", "kill leader"),
    ),
    Planted(
        "the leader's claim outlives it",
        "wanted.append(self._write({LEADER: self.key}, {LEADER: self._unled_at}, leased=True))",
        "wanted.append(self._write({LEADER: self.key}, {LEADER: self._unled_at}, leased=False))",
    ),
    Planted(
        "actions are carried out before they are published",
        "self._deciding = to_text(decision)",
        "self._deciding = to_text(decision)\n            self._heeded = decision['count']",
    ),
    Planted(
        "a node that comes back forgets its workers",
        "for event in [*map(leader.Ready, self._members), *leaving, *unread]:",
        "for event in unread:",
    ),
]
