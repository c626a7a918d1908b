"""Who should be in the next generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.membership.decide import Form, Keep, Pause, View, decide, mutually_connected
from elastic_harness.membership.replica import deal_columns, zip_rows
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


# ---- several shards


def in_shards(
    number: int, members: Sequence[str], shards: tuple[int, ...], rows: Sequence[Sequence[str]]
) -> Generation:
    return Generation(number, tuple(members), True, "test", shards, tuple(map(tuple, rows)))


@st.composite
def sharded_views(draw: st.DrawFn) -> tuple[View, Limits]:
    """A generation in which some are lost and others have joined."""
    shards = draw(st.integers(2, 3))
    columns = deal_columns(draw(st.permutations(NAMES))[: draw(st.integers(shards, 6))], {}, shards)
    rows, _ = zip_rows(columns, ())
    shard_of = {member: shard for shard, column in enumerate(columns) for member in column}
    current = Generation(1, tuple(shard_of), True, "test", tuple(shard_of.values()), rows)
    ready = tuple(draw(st.permutations(NAMES))[: draw(st.integers(0, 7))])
    low, target = sorted(draw(st.tuples(st.integers(1, 6), st.integers(shards, 6))))
    leaving = draw(st.frozensets(st.sampled_from(ready), max_size=2)) if ready else frozenset()
    view = View(current, ready, reform=draw(st.booleans()), leaving=leaving, held=shard_of)
    return view, Limits(min(low, target // shards * shards), 6, target, shards=shards)


@given(sharded_views())
def test_a_generation_has_whole_rows(situation: tuple[View, Limits]) -> None:
    view, limits = situation
    shards, every_shard = limits.shards, set(range(limits.shards))
    outcome = decide(0.0, view, limits)
    held = {m: view.held[m] for m in view.ready if m in view.held}
    staying = [m for m in view.ready if m not in view.leaving]
    rows_of_all = min(map(len, deal_columns(staying, held, shards)))
    if isinstance(outcome, Keep):
        return
    if isinstance(outcome, Pause):
        assert shards * rows_of_all < limits.least
        return
    generation = Generation(2, outcome.members, True, "", outcome.shards, outcome.replicas)
    assert set(generation.members) <= set(view.ready)
    assert len(generation.members) <= limits.target + len(view.leaving.intersection(generation.members))
    assert len(generation.rows) * shards >= max(limits.min_workers, shards)
    assert len(generation.rows) == min(map(len, generation.columns)) >= min(rows_of_all, limits.target // shards)
    assert all(m in column for row in generation.rows for m, column in zip(row, generation.columns, strict=True))
    if set(held.values()) == every_shard:
        assert {held[m] for m in generation.members if m in held} == every_shard, "no shard is given up"
        assert all(generation.shard_of[m] == held[m] for m in generation.members if m in held)
    whole = [row for row in view.current.rows if set(row) <= set(generation.members)] if view.current else []
    if set(held.values()) == every_shard:
        assert [row for row in generation.rows if row in whole] == whole, "whole rows stay"


TWO_ROWS = in_shards(4, "abcd", (0, 1, 0, 1), ("ab", "cd"))
HELD = TWO_ROWS.shard_of
OF_TWO = Limits(1, 8, 4, shards=2)


def test_who_loses_its_mate_is_left_over_and_stays() -> None:
    decision, reason = chosen(0.0, View(TWO_ROWS, tuple("abc"), held=HELD), OF_TWO)
    assert decision is not None and decision.urgent and reason == "1 lost"
    assert (decision.members, decision.shards, decision.replicas) == (tuple("abc"), (0, 1, 0), (("a", "b"),))


def test_a_spare_fills_the_hole_in_the_column() -> None:
    decision, _ = chosen(0.0, View(TWO_ROWS, tuple("acdx"), held=HELD), OF_TWO)
    assert decision is not None and decision.replicas == (("c", "d"), ("a", "x"))
    assert decision.shards == (0, 0, 1, 1)


def test_without_a_whole_row_the_members_wait() -> None:
    outcome = decide(0.0, View(TWO_ROWS, ("b",), held=HELD), OF_TWO)
    assert outcome == Pause("waiting: 0 of at least 2 workers are ready in whole replicas of 2")
    outcome = decide(0.0, View(TWO_ROWS, tuple("abc"), held=HELD), Limits(3, 8, 4, shards=2))
    assert outcome == Pause("waiting: 2 of at least 4 workers are ready in whole replicas of 2")
    with pytest.raises(ValueError, match="at least 4 workers"):
        Limits(3, 8, 3, shards=2)


def test_a_lost_shard_makes_newcomers_of_all() -> None:
    decision, _ = chosen(0.0, View(TWO_ROWS, tuple("ac"), held=HELD), OF_TWO)
    assert decision is not None and decision.replicas == (("a", "c"),) and decision.shards == (0, 1)


def test_of_too_many_the_left_over_go_first() -> None:
    current = in_shards(4, "acbde", (0, 0, 1, 1, 0), ("ab", "cd"))
    decision, _ = chosen(0.0, View(current, tuple("acbde"), held=current.shard_of), Limits(1, 8, 4, shards=2))
    assert decision is not None and decision.members == tuple("acbd") and decision.replicas == current.rows


def test_who_alone_holds_a_shard_leaves_when_another_has_it() -> None:
    one_row = in_shards(4, "ab", (0, 1), ("ab",))
    leaving = frozenset("b")
    decision, _ = chosen(0.0, View(one_row, tuple("abx"), leaving=leaving, held=one_row.shard_of), OF_TWO)
    assert decision is not None and decision.members == tuple("abx") and decision.shards == (0, 1, 1)
    grown = in_shards(5, "abx", (0, 1, 1), ("ab",))
    decision, _ = chosen(0.0, View(grown, tuple("abx"), leaving=leaving, held=grown.shard_of), OF_TWO)
    assert decision is not None and decision.members == tuple("ax") and not decision.urgent


def test_who_leaves_stays_in_an_urgent_generation() -> None:
    """With what it has finished of the step; the boundary after it is where it goes. Its node counts no longer."""
    current, two = Generation(3, tuple("abc"), True, ""), Limits(1, 8, 2)
    lost, _ = chosen(0.0, View(current, tuple("ac"), leaving=frozenset("a"), veterans=frozenset("abc")), two)
    assert lost is not None and lost.members == tuple("ac") and lost.urgent
    broke = View(current, tuple("abc"), leaving=frozenset("a"), veterans=frozenset("abc"), reform=True)
    anew, _ = chosen(0.0, broke, two)
    assert anew is not None and anew.members == tuple("abc")
    again = Generation(4, tuple("ac"), True, "")
    planned, _ = chosen(0.0, View(again, tuple("ac"), leaving=frozenset("a"), veterans=frozenset("ac")), two)
    assert planned is not None and planned.members == ("c",) and not planned.urgent


def test_who_alone_holds_the_state_gives_it_before_it_leaves() -> None:
    """It was given up: the generation was formed without a's state, and a checkpoint was restored."""
    left_out = Generation(3, ("b",), False, "1 removed")  # b dies before it is formed, and c is new
    view = View(left_out, tuple("ac"), leaving=frozenset("a"), veterans=frozenset("ab"))
    decision, _ = chosen(0.0, view, Limits(1, 8, 1))
    assert decision is not None and decision.members == tuple("ac") and decision.urgent


def test_a_newcomer_takes_the_state_before_the_last_member_leaves() -> None:
    """The job was stopped, though the newcomer could have gone on."""
    current, one = Generation(3, ("a",), True, ""), Limits(1, 8, 1)
    joins, _ = chosen(0.0, View(current, tuple("ax"), leaving=frozenset("a"), veterans=frozenset("a")), one)
    assert joins is not None and joins.members == tuple("ax") and not joins.urgent
    both = Generation(4, tuple("ax"), False, "1 joined")
    leaves, _ = chosen(0.0, View(both, tuple("ax"), leaving=frozenset("a"), veterans=frozenset("a")), one)
    assert leaves is not None and leaves.members == ("x",) and not leaves.urgent


def test_those_who_may_leave_together_are_waited_for() -> None:
    current = Generation(3, tuple("ab"), True, "")
    view = View(current, tuple("ab"), leaving=frozenset("a"), veterans=frozenset("ab"), gathering=True)
    assert decide(0.0, view, Limits(1, 8, 1)) == Keep("unchanged")
    spare = View(current, tuple("abx"), leaving=frozenset("x"), veterans=frozenset("ab"), gathering=True)
    assert decide(0.0, spare, Limits(1, 8, 3)) == Keep("unchanged"), "nobody joins to leave"


def test_nobody_has_finished_if_a_shard_is_lost_then() -> None:
    """The newcomers are let in, restore a checkpoint with the others, and the run goes on from there."""
    view = View(TWO_ROWS, tuple("acxy"), finished=frozenset("ac"), held=HELD)
    decision, _ = chosen(0.0, view, OF_TWO)
    assert decision is not None and set(decision.members) == set("acxy") and len(decision.replicas) == 2
    view = View(TWO_ROWS, tuple("abx"), finished=frozenset("a"), held=HELD)
    decision, _ = chosen(0.0, view, OF_TWO)
    assert decision is not None and decision.members == tuple("ab"), "nobody is admitted while the others catch up"


def test_a_cut_between_those_who_only_together_hold_all_shards_is_waited_out() -> None:
    """A checkpoint would be restored otherwise, though both still live. At the end of the patience one is."""
    current = in_shards(4, ("x/a", "y/b"), (0, 1), (("x/a", "y/b"),))
    members = ("x/a", "y/b", "z/c", "z/d")
    view = View(
        current, members, veterans=frozenset(members[:2]), apart=frozenset([frozenset("xy")]), held=current.shard_of
    )
    outcome = decide(0.0, view, OF_TWO)
    assert isinstance(outcome, Pause) and outcome.split
    assert "cannot reach each other; the network is cut between x and y" in outcome.reason
    decision, _ = chosen(0.0, replace(view, hopes=False), OF_TWO)
    assert decision is not None and not {"x/a", "y/b"} <= set(decision.members)
    assert not isinstance(decide(0.0, replace(view, apart=frozenset()), OF_TWO), Pause)


def test_of_the_nodes_that_a_cut_leaves_those_with_all_shards_go_on() -> None:
    """The others are more, and hold one of the shards twice."""
    current = in_shards(4, ("x/a", "x/b", "y/c", "y/d", "z/e"), (0, 1, 0, 0, 0), (("x/a", "x/b"),))
    apart = frozenset([frozenset("xy"), frozenset("xz")])
    view = View(
        current, current.members, veterans=frozenset(current.members), apart=apart, held=current.shard_of, reform=True
    )
    decision, _ = chosen(0.0, view, OF_TWO)
    assert decision is not None and decision.members == ("x/a", "x/b")


def test_nobody_takes_the_place_of_a_member_that_is_about_to_leave() -> None:
    """A node that goes stays in an urgent generation beyond the target, for the lanes that it has finished. A newcomer
    is not let in instead."""
    rows = in_shards(1, ("w0", "w1", "w2", "w3"), (0, 0, 1, 1), (("w0", "w2"), ("w1", "w3")))
    view = View(rows, ("w0", "w4", "w2", "w3"), leaving=frozenset(["w3"]), held=dict(rows.shard_of))
    lost, _ = chosen(0.0, view, Limits(1, 6, 2, shards=2))
    assert lost is not None and lost.members == ("w0", "w2", "w3")
    current = Generation(4, ("a", "b", "c"), True, "")
    broken = frozenset({frozenset(("a", "c")), frozenset(("b", "c"))})
    view = View(current, ("a", "b", "c", "x"), leaving=frozenset("c"), broken=broken, reform=True)
    apart, _ = chosen(0.0, view, Limits(1, 3, 2))
    assert apart is not None and apart.members == ("a", "b"), "its place is not free for another one"


FOUR = Generation(3, ("n0/w0", "n1/w0", "n1/w1", "n2/w0"), False, "test")
SLOW = ("n1/w1",)


def slow_view(*spares: str, **more: object) -> View:
    return replace(View(FOUR, (*FOUR.members, *spares), veterans=FOUR.member_set, slow=SLOW), **more)


def test_a_slow_member_makes_room_for_a_spare_preferably_of_another_machine() -> None:
    change, reason = chosen(0.0, slow_view("n1/w2", "n3/w0"), Limits(2, 6, 4))
    assert change is not None and not change.urgent
    assert change.members == ("n0/w0", "n1/w0", "n2/w0", "n3/w0")
    assert reason == "1 joined, 1 removed, n1/w1 makes room, as it is slow"
    change, _ = chosen(0.0, slow_view("n1/w2"), Limits(2, 6, 4))
    assert change is not None and change.members == ("n0/w0", "n1/w0", "n2/w0", "n1/w2"), "better than none"


def test_a_slow_member_stays_where_nobody_can_take_its_place() -> None:
    limits = Limits(2, 6, 4)
    assert isinstance(decide(0.0, slow_view(), limits), Keep)
    lost = slow_view("n3/w0", ready=("n0/w0", "n1/w0", "n1/w1", "n3/w0"))
    change, _ = chosen(0.0, lost, limits)
    assert change is not None and change.urgent and "n1/w1" in change.members, "the spare fills the hole"
    ending = slow_view("n3/w0", finished=frozenset({"n0/w0"}))
    assert isinstance(decide(0.0, ending, limits), Keep)
    two_nodes = Generation(3, ("n0/w0", "n0/w1", "n1/w1"), False, "test")
    view = View(two_nodes, (*two_nodes.members, "n0/w2"), veterans=two_nodes.member_set, slow=SLOW)
    assert isinstance(decide(0.0, view, Limits(2, 6, 3, min_nodes=2)), Keep), "two nodes are asked for"
    alone = Generation(3, ("n1/w1",), False, "test")
    view = View(alone, ("n1/w1", "n0/w2"), veterans=alone.member_set, slow=SLOW)
    assert isinstance(decide(0.0, view, Limits(1, 6, 1)), Keep), "nobody else has the state"


def test_a_slow_member_that_cannot_go_keeps_no_other_from_it() -> None:
    """Two nodes are asked for, so the only member of one of them stays."""
    two_nodes = Generation(3, ("a/w0", "b/w0", "b/w1"), False, "test")
    slow = View(two_nodes, (*two_nodes.members, "b/w2"), veterans=two_nodes.member_set, slow=("a/w0", "b/w0"))
    change, _ = chosen(0.0, slow, Limits(2, 6, 3, min_nodes=2))
    assert change is not None and change.members == ("a/w0", "b/w1", "b/w2")


@given(st.floats(0, 1e4), views(), limits(), st.data())
def test_for_a_slow_member_there_are_never_fewer_members(
    now: float, view: View, limits: Limits, data: st.DataObject
) -> None:
    """Nor any other waiting, nor any more haste."""
    if view.current is None:
        return
    slow = replace(view, slow=(data.draw(st.sampled_from(view.current.members)),))
    before, after = decide(now, view, limits), decide(now, slow, limits)
    if isinstance(before, Pause):
        assert after == before
        return
    was = before.members if isinstance(before, Form) else view.current.members
    will = after.members if isinstance(after, Form) else view.current.members
    assert not isinstance(after, Pause) and len(will) == len(was)
    if isinstance(after, Form) and set(will) != set(was):
        assert not after.urgent and set(was) - set(will) == set(slow.slow) and len(set(will) - set(was)) == 1
