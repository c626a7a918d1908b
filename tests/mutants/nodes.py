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
        "checkpoints in doubt are restored",
        "lineage=begun, from_step=version, doubts=doubts, omissions=every)",
        "lineage=begun, from_step=1 << 30, omissions=every)",
        shape=with_faults("doubt", "kill worker"),
    ),
    Planted(
        "a digest lacks what a rollback omits",
        "overdue=overdue, omissions=state.omissions)",
        "overdue=overdue)",
        shape=with_faults("doubt", "kill worker"),
    ),
    Planted(
        "events are let go once they are written",
        "replace(self, written=self.writing, writing=None)",
        "replace(self, written=self.writing, writing=None, events=())",
    ),
    Planted(
        "actions of another origin are counted on",
        'state = replace(state, origin=decision["origin"], heeded=0)',
        'state = replace(state, origin=decision["origin"])',
    ),
    Planted(
        "what others know is not asked for",
        "known = known.and_also(more)",
        "known = known",
        (('known=lead.known.and_also(Known(**record["known"]))', "known=lead.known"),),
    ),
    Planted(
        "nobody is waited for",
        "if self.state is None and now >= self.patient_until:",
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
        "(finished if bereft else frozenset()) if ending",
        "frozenset() if ending",
        shape=JobShape(8, 4, 20, 8, spare_nodes=2),
        first=30099270,
    ),
    Planted(
        "who comes back while the others wait is taken for one who leaves",
        'and own.writing is None and not decision["paused"]:',
        "and own.writing is None:",
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
        'state=state)._lose(record["members"])',
        "state=state)",
    ),
    Planted(
        "only a node's last record tells who is lost with it",
        'lead = lead._lose(member for member in before["members"] if member not in record["members"])',
        "pass",
        (("if own.ended is not None:\n            break", "if False:\n            break"),),
        shape=with_faults("stop all", "stop all", "cut one way"),
        first=200,
    ),
    Planted(
        "a leader that begins takes its own workers, with or without the state",
        "(m not in view.veterans, node_of(m) in slow_nodes)",
        "(False, node_of(m) in slow_nodes)",
        (("state=state, missed=True)._follow", "state=state)._follow"),),
        shape=JobShape(8, 4, 30, 8, kinds=("store loses all", "kill half")),
    ),
    Planted(
        "nodes that died with the leader are not missed",
        "lead._step([*map(protocol.Lost, lost), *lead._scaled()], now)",
        "lead._step(lead._scaled(), now)",
    ),
    Planted(
        "the first member restores, whoever has the checkpoint",
        "first = [next(m for m in column if version in offers[m]) for column in generation.columns]",
        "first = [column[0] for column in generation.columns]",
        shape=with_faults("kill all", "kill half", "kill node"),
        first=290,
    ),
    Planted(
        "what was not read is forgotten with the lease",
        "events = [*map(protocol.Ready, self.members), *leaving, *unread]",
        "events = [*map(protocol.Ready, self.members), *leaving]",
        shape=with_faults("cut all from store", "kill worker"),
    ),
    Planted(
        "a node comes back under its old key",
        "session=self.session + 1,",
        "session=self.session,",
        shape=with_faults("cut all from store", "kill leader"),
    ),
    Planted(
        "the leader's claim outlives it",
        "{LEADER: state.unled_at}, leased=True)",
        "{LEADER: state.unled_at}, leased=False)",
    ),
    Planted(
        "actions are carried out before they are published",
        "replace(state, deciding=text)",
        "replace(state, deciding=text, heeded=decision['count'])",
    ),
    Planted(
        "a node that comes back forgets its workers",
        "events = [*map(protocol.Ready, self.members), *leaving, *unread]",
        "events = unread",
    ),
]
