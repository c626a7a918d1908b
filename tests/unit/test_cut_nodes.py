"""Nodes whose network is cut: who goes on, who waits, for how long, and what is said of it."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_harness.agent.decisions.unreachable import Cuts
from elastic_harness.membership import protocol
from elastic_harness.membership.codec import encode
from elastic_harness.membership.decide import Form, View, decide, on_connected_nodes
from elastic_harness.membership.lead import Lead
from elastic_harness.membership.protocol import (
    APART_S,
    HEARING_S,
    Action,
    Announce,
    Event,
    Finished,
    Lost,
    Pause,
    Ready,
    Reported,
    Scaled,
    State,
    Tick,
    Trouble,
)
from elastic_harness.membership.types import Generation, Limits, Report, node_of

NODES = "abcd"
MEMBERS = [f"{node}/{i}" for node in NODES for i in range(2)]
GRACE_S = Limits().trouble_grace_s


def pairs(*names: str) -> frozenset[frozenset[str]]:
    return frozenset(map(frozenset, names))


def run(state: State, *happened: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for event in happened:
        state, more = protocol.step(state, event, now)
        actions.extend(more)
    return state, actions


def announced(actions: list[Action]) -> list[tuple[str, ...]]:
    return [action.generation.members for action in actions if isinstance(action, Announce)]


def formed(*names: str, limits: Limits | None = None) -> State:
    """A leader whose first generation has these members and is formed."""
    state, _ = protocol.steps(State(limits or Limits(1, 8, len(names))), [Ready(m) for m in names], 0.0)
    state, _ = run(state, *(Reported(m, Report(1, 5)) for m in names))
    assert state.formed and state.generation is not None and state.generation.members == names
    return state


@given(
    st.permutations(MEMBERS),
    st.integers(0, 8),
    st.frozensets(st.sampled_from(MEMBERS)),
    st.frozensets(st.sampled_from([frozenset(p) for p in combinations(NODES, 2)])),
)
@example(["b/0", "a/1", "a/0", "b/1"], 4, frozenset({"a/0", "b/1"}), frozenset({frozenset({"a", "b"})}))  # equals
def test_no_two_nodes_that_are_cut_from_each_other_go_on_together(
    members: list[str], count: int, veterans: frozenset[str], apart: frozenset[frozenset[str]]
) -> None:
    ready = members[:count]
    view = View(None, tuple(ready), veterans=veterans, apart=apart)
    chosen = on_connected_nodes(ready, view)
    nodes = {node_of(m) for m in chosen}
    assert not any(pair <= nodes for pair in apart)
    assert chosen == [m for m in ready if node_of(m) in nodes]

    def worth(some: set[str]) -> tuple[int, int]:
        inside = [m for m in ready if node_of(m) in some]
        return len(veterans & set(inside)), len(inside)

    allowed = [set(s) for n in range(5) for s in combinations(NODES, n) if not any(p <= set(s) for p in apart)]
    assert worth(nodes) == max(map(worth, allowed)), "those who hold the state come first, then the number"
    assert on_connected_nodes(ready, view) == chosen
    veterans_first = sorted(ready, key=lambda m: m not in veterans)  # as `decide` asks: of equals, the first one counts
    decision = decide(1e6, view, Limits(1, 8, 8))
    assert not isinstance(decision, Form) or list(decision.members) == on_connected_nodes(veterans_first, view)


def test_of_equals_the_one_with_the_first_rank_goes_on() -> None:
    view = View(None, (), apart=pairs("ab"))
    assert on_connected_nodes(["b/0", "a/0", "c/0"], view) == ["b/0", "c/0"]


def test_a_cut_pair_is_separated_at_once_and_stays_so() -> None:
    state = formed("a/0", "b/0", "c/0")
    state, actions = run(
        state, Trouble("a/0", 1, ("b/0",), cut=True), Trouble("b/0", 1, ("a/0",), cut=True), Tick(), now=100.0
    )
    assert actions == []
    state, actions = run(state, Tick(), now=100.0 + GRACE_S)
    assert announced(actions) == [("a/0", "c/0")]
    state, actions = run(state, *(Reported(m, Report(2, 5)) for m in ("a/0", "c/0")), now=100.5)
    state, actions = run(state, Lost("b/0"), Ready("b/1"), Ready("b/2"), now=101.0)
    for second in range(1, int(APART_S)):
        state, more = run(state, Tick(), now=100.0 + second)
        actions += more
    assert actions == [], "the others of that node wait, however many they are"
    assert state.broken == ()
    state, actions = run(state, Tick(), now=100.0 + APART_S)
    assert announced(actions) == [("a/0", "c/0", "b/1")]
    assert [a.generation.urgent for a in actions if isinstance(a, Announce)] == [False], "it is tried again"


def test_a_link_without_evidence_still_gets_a_second_try() -> None:
    state, _ = run(formed("a/0", "b/0"), Trouble("a/0", 1, ("b/0",)))
    _, actions = run(state, Tick(), now=1.0)
    assert announced(actions) == [("a/0", "b/0")] and state.apart == ()


def test_within_a_node_evidence_is_no_more_than_an_accusation() -> None:
    for first, second in (("w0", "w1"), ("a/0", "a/1")):
        state, _ = run(formed(first, second), Trouble(first, 1, (second,), cut=True))
        assert state.apart == () and state.broken == ((1, first, second),)


def test_who_says_nothing_does_not_go_on_in_place_of_who_does() -> None:
    """The first rank's node is cut from everything: the store too, so it never says anything."""
    state = formed("a/0", "a/1", "b/0")
    state, actions = run(state, Trouble("b/0", 1, ("a/0", "a/1"), cut=True), now=10.0)
    state, more = run(state, Tick(), now=9.9 + HEARING_S)
    assert actions + more == [], "it may be late"
    _, actions = run(state, Tick(), now=10.0 + HEARING_S)
    assert announced(actions) == [("b/0",)]
    _, actions = run(state, Trouble("a/1", 1, ("b/0",), cut=True), now=11.0)
    assert announced(actions) == [("a/0", "a/1")], "it has said something, and is worth more"


def test_nobody_is_waited_for_who_would_not_go_on_anyway() -> None:
    state, _ = run(formed("a/0", "b/0", "c/0"), Trouble("b/0", 1, ("a/0",), cut=True), now=10.0)
    state, actions = run(state, Trouble("c/0", 1, ("a/0",), cut=True), Tick(), now=10.0 + GRACE_S)
    assert announced(actions) == [("b/0", "c/0")]


@pytest.mark.parametrize("received", [False, True])
def test_who_has_just_come_does_not_displace_who_holds_the_state(received: bool) -> None:
    """All have reported, so the generation is formed, but whether the newcomers have received the state they alone
    know."""
    state, _ = protocol.steps(formed("a/0"), [Scaled(8), Ready("b/0"), Ready("b/1")], 0.0)
    reports = {"a/0": Report(2, 7), "b/0": Report(2, -1), "b/1": Report(2, -1)}
    state, _ = run(state, *(Reported(m, report) for m, report in reports.items()))
    assert state.formed
    troubles = [Trouble(m, 2, ("a/0",), cut=True, holds=received) for m in ("b/0", "b/1")]
    state, _ = run(state, *troubles, Trouble("a/0", 2, ("b/0", "b/1"), cut=True, holds=True), now=1.0)
    _, actions = run(state, Tick(), now=1.0 + GRACE_S)
    assert announced(actions) == [("b/0", "b/1") if received else ("a/0",)]


def test_who_has_finished_is_not_left_out_for_its_silence() -> None:
    """Nothing tells it of a cut: it exchanges nothing any more. The other one would do the last step again."""
    state, _ = protocol.steps(formed("a/0"), [Scaled(8), Ready("b/0")], 0.0)
    state, _ = run(state, Reported("a/0", Report(2, 7)), Reported("b/0", Report(2, -1)))
    state, _ = run(state, Finished("a/0", 7), Trouble("b/0", 2, ("a/0",), cut=True), now=1.0)
    _, actions = run(state, Tick(), now=1.0 + GRACE_S)
    assert announced(actions) == [("a/0",)]


def test_who_comes_back_after_a_pause_is_told_to_go_on() -> None:
    """The record of a node was gone for a while, its workers were not: in the pause they aborted what they did."""
    state = formed("a/0", "b/0", limits=Limits(2, 4, 2))
    state, actions = run(state, Lost("b/0"))
    assert [type(a) for a in actions] == [Pause]
    _, actions = run(state, Ready("b/0"))
    assert announced(actions) == [("a/0", "b/0")]


@pytest.mark.parametrize("limits", [Limits(2, 4, 2), Limits(1, 4, 2, min_nodes=2)], ids=["workers", "nodes"])
def test_too_few_on_either_side_wait_and_try_again(limits: Limits) -> None:
    state = formed("a/0", "b/0", limits=limits)
    state, _ = run(state, Trouble("a/0", 1, ("b/0",), cut=True), Trouble("b/0", 1, ("a/0",), cut=True), now=10.0)
    state, actions = run(state, *[Tick()] * 3, now=11.0)
    (pause,) = actions
    assert isinstance(pause, Pause) and "the network is cut between a and b" in pause.reason
    state, actions = run(state, Tick(), now=9.0 + APART_S)
    assert actions == []
    _, actions = run(state, Tick(), now=10.0 + APART_S)
    assert announced(actions) == [("a/0", "b/0")]
    _, actions = run(state, Lost("b/0"), Ready("c/0"), now=20.0)
    assert announced(actions) == [("a/0", "c/0")], "without the other one there is nothing to wait for"


def test_a_new_leader_counts_on_by_its_own_clock() -> None:
    state, _ = run(formed("a/0", "b/0"), Trouble("a/0", 1, ("b/0",), cut=True), now=1000.0)
    decision: dict[str, Any] = {
        "origin": "x", "taken": {}, "actions": [], "count": 0, "now": 1000.125, "about": {},
        "known": {"born": True}, "state": encode(state),
    }  # fmt: skip
    lead = Lead("run/node/b.0", 1, Limits(), 100.0, "origin").read_all({}, decision, now=5.0)
    assert lead.state is not None
    assert (lead.state.apart, lead.state.trouble_at) == (((4.875, "a", "b"),), 4.875)


def test_nodes_that_are_gone_for_long_are_forgotten() -> None:
    state = formed("a/0", "b/0", "c/0")
    for number in range(50):
        now = 10.0 * number
        event = Trouble("a/0", state.number, (f"x{number}/0",), cut=True)
        state, _ = run(state, event, now=now)
        assert len(state.apart) <= APART_S / 10.0 + 1
        state, _ = run(state, Tick(), now=now + 1.0)
        assert state.generation == Generation(state.number, ("a/0", "b/0", "c/0"), True, "the exchange broke")
        state, _ = run(state, *(Reported(m, Report(state.number, 5)) for m in ("a/0", "b/0", "c/0")), now=now + 1.0)


def test_the_user_is_told_once_for_each_node() -> None:
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    agent: Any = SimpleNamespace(
        console=SimpleNamespace(notice=lines.append),
        records=SimpleNamespace(event=lambda _, **fields: events.append(fields)),
    )
    cuts = Cuts(agent, "a-1")
    for _ in range(2):
        cuts.tell({"b-2/w0": "10.0.0.2:40123 (no answer within 1.5 s)", "b-2/w1": "10.0.0.2:40124 (no answer)"})
        cuts.tell({"a-1/w0": "127.0.0.1:1 (no answer)"})
    assert len(lines) == 1
    assert "node a-1 cannot reach node b-2 at 10.0.0.2:40123 (no answer within 1.5 s)" in lines[0]
    assert "firewall" in lines[0] and "--host" in lines[0]
    assert events == [{"node": "a-1", "peer": "b-2", "way": "10.0.0.2:40123 (no answer within 1.5 s)"}]
