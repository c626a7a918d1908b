"""Who holds up whom: the culprit is named by logic, and never guessed."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.health.waits import Culprit, Observed, find_culprits, in_words

NAMES = [f"w{i}" for i in range(7)]
UNSEEN = "n2/w0"


def member(state: str = "well", *peers: str, since: float = 0.0) -> Observed:
    waits = dict.fromkeys(peers, "the header of step 12")
    return Observed(state, "computing slot 3, step 12", since, waits)  # type: ignore[arg-type]


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Observed]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    return {
        name: member(
            draw(st.sampled_from(["well", "well", "late", "stopped"])),
            *draw(st.lists(st.sampled_from([n for n in [*NAMES, UNSEEN] if n != name]), max_size=3, unique=True)),
            since=draw(st.integers(0, 5)),
        )
        for name in names
    }


def edges(seen: dict[str, Observed]) -> set[tuple[str, str]]:
    return {(name, peer) for name, m in seen.items() if m.state != "stopped" for peer in m.waits}


def reaches(seen: dict[str, Observed], start: str, goal: str) -> bool:
    """As the definition has it: repeat until nothing is added."""
    reached = {peer for name, peer in edges(seen) if name == start}
    while more := {peer for name, peer in edges(seen) if name in reached} - reached:
        reached |= more
    return goal in reached


@given(graphs())
def test_a_culprit_is_reached_by_all_who_wait_because_of_it_and_by_nobody_else(seen: dict[str, Observed]) -> None:
    for culprit in find_culprits(seen):
        for end, name in itertools.product(culprit.members, seen):
            assert name in (*culprit.waiters, *culprit.members) or not reaches(seen, name, end)
            assert name not in culprit.waiters or reaches(seen, name, end)
        assert in_words(culprit, seen)


@given(graphs())
def test_nobody_is_said_to_hang_without_evidence(seen: dict[str, Observed]) -> None:
    waiting = {name for name, _ in edges(seen)}
    for culprit in find_culprits(seen):
        states = [seen[name].state for name in culprit.members if name in seen]
        match culprit.verdict:
            case "hangs":
                assert states in (["late"], ["stopped"]) and culprit.members[0] not in waiting
            case "slow":
                assert states == ["well"] and culprit.members[0] not in waiting and culprit.waiters
            case "unknown":
                assert not states and culprit.waiters
            case "deadlock":
                assert "late" in states and waiting >= set(culprit.members)
                pairs = itertools.product(culprit.members, repeat=2)
                assert all(reaches(seen, one, other) for one, other in pairs)


@given(graphs())
def test_every_chain_of_waits_that_ends_has_a_finding(seen: dict[str, Observed]) -> None:
    culprits = find_culprits(seen)
    named = {name for culprit in culprits for name in culprit.members}
    waiting = {name for name, _ in edges(seen)}
    for name, peer in edges(seen):
        assert peer in waiting or peer in named, f"{name} waits for {peer}, who waits for nobody"
    for name in seen.keys() - waiting:
        assert seen[name].state == "well" or name in named, "who hangs is named even if nobody waits"
    assert len(named) == sum(len(culprit.members) for culprit in culprits), "nobody is named twice"


def test_the_member_that_all_wait_for_is_named_and_not_who_waits_for_it_too() -> None:
    seen = {"w0": member("well", "w1", "w2"), "w1": member("late"), "w2": member("well", "w0", "w1")}
    assert find_culprits(seen) == (Culprit("hangs", ("w1",), ("w0", "w2")),)


def test_a_slow_member_is_not_said_to_hang_beside_one_that_does() -> None:
    seen = {"w0": member("well", "w1", "w2"), "w1": member("well"), "w2": member("stopped", "w0")}
    assert find_culprits(seen) == (Culprit("hangs", ("w2",), ("w0",)), Culprit("slow", ("w1",), ("w0",)))


def test_a_circle_is_a_deadlock_once_somebody_in_it_is_late() -> None:
    seen = {"w0": member("well", "w1", since=9), "w1": member("well", "w0", since=4), "w2": member("well", "w0")}
    assert find_culprits(seen) == ()
    seen["w0"] = member("late", "w1", since=9)
    (found,) = find_culprits(seen)
    assert found == Culprit("deadlock", ("w1", "w0"), ("w2",)), "in the order in which they began to wait"
    assert in_words(found, seen) == (
        "a deadlock, in the order in which they began to wait: w1 waits for the header of step 12 from w0; w0 waits "
        "for the header of step 12 from w1; w2 waits behind them"
    )


def test_a_circle_with_a_way_out_to_somebody_who_hangs_is_no_deadlock() -> None:
    seen = {"w0": member("late", "w1"), "w1": member("well", "w0", "w2"), "w2": member("late")}
    assert find_culprits(seen) == (Culprit("hangs", ("w2",), ("w0", "w1")),)


def test_of_a_member_elsewhere_nothing_is_known() -> None:
    seen = {"w0": member("late", UNSEEN)}
    (found,) = find_culprits(seen)
    assert found == Culprit("unknown", (UNSEEN,), ("w0",))
    assert in_words(found, seen) == f"w0 waits for the header of step 12 from {UNSEEN}, of which nothing is known here"


def test_the_sentence_says_who_waits_for_what_and_what_the_culprit_does() -> None:
    seen = {"w0": member("well", "w1"), "w1": member("late"), "w2": member("well", "w1"), "w3": member("well", "w2")}
    (found,) = find_culprits(seen)
    assert in_words(found, seen) == (
        "w0 and w2 wait for the header of step 12 from w1, which hangs: computing slot 3, step 12; w3 waits behind them"
    )
    assert in_words(Culprit("hangs", ("w1",), ()), seen).startswith("nobody waits for w1, which hangs: ")
