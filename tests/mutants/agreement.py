"""Planted mistakes of how nodes agree through a store, which the exploration of small worlds must find."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_harness.simulate.node_model import NodeSize
from elastic_harness.simulate.node_world import NodeFaults
from mutants.patch import Patch


@dataclass(frozen=True)
class Agreed(Patch):
    """`size`: a world that shows the mistake. `kind`: of the violation. `deep`: it takes long to find."""

    kind: str = "stuck"
    size: NodeSize = NodeSize()  # noqa: RUF009  (immutable)
    deep: bool = False


def with_faults(**faults: int) -> NodeSize:
    return NodeSize(faults=NodeFaults(**faults))


PATCHES = [
    Agreed(
        "who is told to go takes the state along",
        "if urgent or view.gathering or staying.isdisjoint(surviving):",
        "if False:",
        (("if urgent and (view.current is None or staying.isdisjoint(view.veterans)):", "if False:"),),
        kind="state given up",
        size=NodeSize(steps=2, faults=NodeFaults(workers=1, drains=1)),
    ),
    Agreed(
        "a job is stopped while a node wants workers",
        "self.state.generation is None or self.wanted or not",
        "self.state.generation is None or not",
        kind="stopped too early",
        size=NodeSize(steps=2, faults=NodeFaults(workers=1, drains=1)),
    ),
    Agreed(
        "who leads is not compared when a decision is written",
        "compare = {DECISION: state.decision_at, LEADER: lead.revision}",
        "compare = {DECISION: state.decision_at}",
        kind="decided without leading",
        size=with_faults(damages=1, holds=1),
    ),
    Agreed(
        "a lease that ended is not replaced",
        "        lead=None,\n    )\n    return state, (Register(),)",
        "        lead=None,\n    )\n    return state, ()",
        size=with_faults(losses=1),
    ),
    Agreed(
        "actions are carried out again",
        "for number, action in actions if number > heeded]",
        "for number, action in actions if number >= heeded]",
        kind="carried out twice",
        size=NodeSize(cold=True),
    ),
    Agreed(
        "the next leader does not read on where the last one was",
        "return replace(lead, state=state)._follow(list(lead.records))",
        "return replace(lead, state=state)",
        size=with_faults(damages=1),
    ),
    Agreed(
        "a node that is gone still counts",
        "return replace(state, lead=lead.ended(key))",
        "return state",
        size=with_faults(nodes=1),
    ),
    Agreed(
        "a leader's key that is damaged is claimed as if it were not there",
        "{LEADER: state.unled_at}",
        "{LEADER: 0}",
        kind="never ends",
        size=with_faults(damages=1),
    ),
    Agreed(
        "after a refused claim nobody looks who leads",
        "return replace(state, leader_known=False), (Follow(everything=False),)",
        "return replace(state, leader_known=False), ()",
        size=with_faults(damages=2),
        deep=True,
    ),
    Agreed(
        "a leader begins anew under a former name",
        'return f"{origin}.{state.writes_asked}" if state.origin.startswith(origin) else origin',
        "return origin",
        size=with_faults(damages=2),
        deep=True,
    ),
]
