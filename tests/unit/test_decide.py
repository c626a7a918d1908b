"""Who should be in the next generation."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.membership.decide import Form, View, decide, mutually_connected
from elastic_harness.membership.types import Generation, Limits

NAMES = [f"w{i}" for i in range(7)]
Pairs = frozenset[frozenset[str]]


def pairs_of(names: list[str]) -> st.SearchStrategy[Pairs]:
    every = [frozenset(p) for p in combinations(names, 2)]
    return st.frozensets(st.sampled_from(every), max_size=8)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    low, target, high = sorted(draw(st.lists(st.integers(1, 6), min_size=3, max_size=3)))
    return Limits(low, high, target)


@st.composite
def views(draw: st.DrawFn) -> View:
    ready = draw(st.permutations(NAMES))[: draw(st.integers(0, 6))]
    current = None
    if draw(st.booleans()):
        members = draw(st.permutations(NAMES))[: draw(st.integers(1, 5))]
        current = Generation(draw(st.integers(1, 9)), tuple(members), draw(st.booleans()), "test")
    finished = draw(st.frozensets(st.sampled_from(ready))) if ready and current else frozenset()
    return View(
        current=current,
        ready=tuple(ready),
        finished=finished,
        broken=draw(pairs_of(NAMES)),
        reform=draw(st.booleans()),
    )


def chosen(now: float, view: View, limits: Limits) -> tuple[Form | None, str]:
    """The change that is decided, if there is one, and why."""
    outcome = decide(now, view, limits)
    return (outcome if isinstance(outcome, Form) else None), outcome.reason


@given(st.floats(0, 1e4), views(), limits())
def test_whatever_is_decided_is_allowed(now: float, view: View, limits: Limits) -> None:
    decision, reason = chosen(now, view, limits)
    assert reason
    if decision is None:
        return
    members = decision.members
    assert members and len(set(members)) == len(members)
    assert set(members) <= set(view.ready)
    old = view.current.members if view.current else ()
    survivors = [m for m in members if m in old]
    newcomers = [m for m in members if m not in old]
    assert list(members) == survivors + newcomers
    assert survivors == [m for m in old if m in survivors], "survivors keep their order"
    assert newcomers == [m for m in view.ready if m in newcomers], "the oldest newcomer comes first"
    if view.finished:
        assert set(newcomers) <= view.finished
    else:
        assert limits.min_workers <= len(members) <= limits.target
    connected = not any(pair <= set(members) for pair in view.broken)
    candidates = [m for m in view.ready if m in old or m in view.finished or not view.finished]
    least = 1 if view.finished else limits.min_workers
    assert connected or len(mutually_connected(candidates, view.broken)) < least
    if view.current is None or any(m not in view.ready for m in old):
        assert decision.urgent, "the first generation and every loss act at once"


@given(st.floats(0, 1e4), views(), limits())
def test_a_job_with_enough_workers_never_just_waits(now: float, view: View, limits: Limits) -> None:
    if view.current is None or view.finished:
        return
    decision, reason = chosen(now, view, limits)
    if decision is None:
        assert reason == "unchanged" or len(view.ready) < limits.min_workers
    if reason == "unchanged":
        assert set(view.current.members) <= set(view.ready)


@given(st.permutations(NAMES), pairs_of(NAMES))
def test_mutually_connected_is_a_largest_set_in_the_given_order(members: list[str], broken: Pairs) -> None:
    chosen = mutually_connected(members, broken)
    assert not any(pair <= set(chosen) for pair in broken)
    assert chosen == [m for m in members if m in chosen]
    largest = max(
        len(some)
        for count in range(len(members) + 1)
        for some in combinations(members, count)
        if not any(pair <= set(some) for pair in broken)
    )
    assert len(chosen) == largest


@given(st.sets(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=60))
def test_many_broken_pairs_still_leave_a_connected_set(numbers: set[tuple[int, int]]) -> None:
    members = [f"w{i}" for i in range(30)]
    broken = frozenset(frozenset((f"w{a}", f"w{b}")) for a, b in numbers if a != b)
    chosen = mutually_connected(members, broken)
    assert chosen and not any(pair <= set(chosen) for pair in broken)


def test_the_first_generation_waits_for_everyone_until_the_join_timeout() -> None:
    limits = Limits(1, 4, 3, join_timeout_s=10.0)
    view = View(None, ("a", "b"), first_ready_at=100.0)
    waiting, reason = chosen(109.0, view, limits)
    assert waiting is None and "2 of 3" in reason
    decision, _ = chosen(110.0, view, limits)
    assert decision is not None and decision.members == ("a", "b")


def test_a_spare_takes_the_place_of_a_separated_member() -> None:
    current = Generation(4, ("a", "b", "c"), True, "")
    broken = frozenset({frozenset(("a", "b"))})
    decision, _ = chosen(0.0, View(current, ("a", "b", "c", "spare"), broken=broken, reform=True), Limits(1, 3, 3))
    assert decision is not None
    assert len(decision.members) == 3 and "spare" in decision.members and "c" in decision.members


def test_too_few_connected_members_try_again_together() -> None:
    current = Generation(4, ("a", "b"), True, "")
    broken = frozenset({frozenset(("a", "b"))})
    decision, reason = chosen(0.0, View(current, ("a", "b"), broken=broken, reform=True), Limits(2, 2, 2))
    assert decision is not None and decision.members == ("a", "b") and "exchange broke" in reason


def test_those_who_finished_outside_are_let_in_if_the_generation_came_to_nothing() -> None:
    limits = Limits(min_workers=2, max_workers=4, target=4)
    dead = Generation(3, ("c", "d"), True, "formed without a and b, which were cut off with the state")
    decision, _ = chosen(0.0, View(dead, ("spare", "a", "b"), finished=frozenset("ab"), waited=True), limits)
    assert decision is not None and decision.urgent and decision.members == ("a", "b")
    view = View(dead, ("c", "d", "a"), finished=frozenset("a"), stateless=frozenset("cd"), reform=True, waited=True)
    decision, _ = chosen(0.0, view, limits)
    assert decision is not None and decision.members == ("c", "d", "a"), "it gives the state to those who have none"


def test_those_who_finished_are_let_in_again_when_nobody_knows_the_generation_any_more() -> None:
    view = View(current=None, ready=("a", "b", "c"), finished=frozenset("ab"))
    decision, _ = chosen(100.0, view, Limits(min_workers=2, max_workers=3, target=3))
    assert decision is not None and decision.urgent and decision.members == ("a", "b", "c")
    alone = View(current=None, ready=("a",), finished=frozenset("a"))
    decision, _ = chosen(1000.0, alone, Limits(min_workers=2, max_workers=3, target=2))
    assert decision is not None and decision.urgent and decision.members == ("a",), "the minimum no longer applies"
