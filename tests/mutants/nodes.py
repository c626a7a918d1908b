"""Planted mistakes of what nodes do to agree through a store, and of what they decide, for the simulator to find."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_harness.commands.simulate import JobShape
from mutants.patch import Patch


def with_faults(*kinds: str) -> JobShape:
    """A small job that meets these only."""
    return JobShape(6, 3, 15, 8, kinds=kinds)


@dataclass(frozen=True)
class Planted(Patch):
    """`shape`: a job that shows the mistake well. `first`: from this seed on; some take a rare coincidence."""

    shape: JobShape = JobShape(6, 3, 15, 8)  # noqa: RUF009  (immutable)
    first: int = 0


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
        (('self._known = self._known.and_also(Known(**record["known"]))', "pass"),),
    ),
    Planted(
        "nobody is waited for",
        "if self.state is None and now >= self._patient_until:",
        "if self.state is None:",
        shape=with_faults("store loses all", "kill node", "pause node"),
    ),
    Planted(
        "a generation that the store has forgotten is waited for",
        "reacts = boundary or not formed or member",
        "reacts = boundary or member",
        shape=JobShape(8, 4, 20, 8),
        first=3002251,
    ),
    Planted(
        "who finished outside of the generation stays outside",
        "(view.finished if bereft else frozenset()) if ending",
        "frozenset() if ending",
        shape=JobShape(8, 4, 20, 8, spare_nodes=2),
        first=30099270,
    ),
    Planted(
        "who comes back while the others wait is taken for one who leaves",
        'and self._writing is None and not decision["paused"]:',
        "and self._writing is None:",
        shape=JobShape(3, 3, 20, 8, least_nodes=2),
        first=10043887,
    ),
    Planted(
        "whoever is first begins at zero",
        "if begins and state.saved and not alone and _others_may_come(state, now):",
        "if False:",
        shape=JobShape(8, 4, 30, 4, spare_nodes=2, kinds=("kill half",)),
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
        shape=with_faults("stop all", "stop all", "cut one way"),
        first=200,
    ),
    Planted(
        "a leader that begins takes its own workers, with or without the state",
        "key=lambda m: m not in view.veterans",
        "key=lambda m: False",
        (
            (
                "        self._missed = True\n        self._follow(list(self._records))",
                "        self._follow(list(self._records))",
            ),
        ),
        shape=JobShape(8, 4, 30, 8, kinds=("store loses all", "kill half")),
    ),
    Planted(
        "nodes that died with the leader are not missed",
        "self._step([*map(leader.Lost, lost), *self._scaled()], now)",
        "self._step(self._scaled(), now)",
    ),
    Planted(
        "the first member restores, whoever has the checkpoint",
        "source_member = next(m for m in members if offers.get(m) == version)",
        "source_member = members[0]",
        shape=with_faults("kill all", "kill half", "kill node"),
        first=290,
    ),
    Planted(
        "what was not read is forgotten with the lease",
        "for event in [*map(leader.Ready, self._members), *leaving, *unread]:",
        "for event in [*map(leader.Ready, self._members), *leaving]:",
        shape=with_faults("cut all from store", "kill worker"),
    ),
    Planted(
        "a node comes back under its old key",
        "self._session += 1",
        "self._session += 0",
        shape=with_faults("cut all from store", "kill leader"),
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
