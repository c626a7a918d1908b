"""Any placement, after any history of losses and joins, gives the same bits; and no byte travels in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_harness.comm import plan as planning
from elastic_harness.comm.placement import Ranges, balanced_cuts, deal, deal_to_rows, merge_ranges
from elastic_harness.comm.plan import Plan, Transfer, make_plan
from elastic_harness.comm.tree import Span, key, maximal_spans, parent_and_sibling, split
from elastic_harness.membership.types import node_of
from elastic_harness.train.attempt import plan_step

Vector = npt.NDArray[np.float32]
BLOCK = 4


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "BLOCK", BLOCK)
        yield


def flat(ranges: Ranges) -> list[int]:
    return [lane for lo, hi in ranges for lane in range(lo, hi)]


def tree_sum(node: Span, lanes: Sequence[Vector]) -> Vector:
    if node[1] - node[0] == 1:
        return lanes[node[0]]
    left, right = split(node)
    return tree_sum(left, lanes) + tree_sum(right, lanes)


def transfers(plan: Plan) -> tuple[Transfer, ...]:
    return *plan.join, *plan.reduce, *plan.gather, *plan.spread


def execute(plan: Plan, lanes: Sequence[Vector], world: int) -> list[Vector]:
    """Every rank's result: only what the plan sends is ever seen by another rank, and never before its stage."""
    elements, root = len(lanes[0]), (0, len(lanes))
    holder = dict(plan.cover)
    held: list[dict[Span, Vector]] = [{} for _ in range(world)]
    used: dict[tuple[int, Span], npt.NDArray[np.bool_]] = {}
    for node, rank in plan.cover:
        held[rank][node] = tree_sum(node, lanes)

    def value(rank: int, node: Span, lo: int, hi: int) -> Vector:
        if node in held[rank]:
            if (rank, node) in used:
                used[rank, node][lo:hi] = True
            return held[rank][node][lo:hi]
        left, right = split(node)
        return value(rank, left, lo, hi) + value(rank, right, lo, hi)

    def deliver(transfers: Sequence[Transfer]) -> None:
        sent = [value(t.source, t.span, t.lo, t.hi) for t in transfers if t.span is not None]
        for t, elements_sent in zip(transfers, sent, strict=True):
            assert t.span is not None and t.span not in held[t.target], "sent twice, or to whom has it"
            assert t.source != t.target and t.hi > t.lo and not np.isnan(elements_sent).any()
            held[t.target][t.span] = np.full(elements, np.nan, np.float32)
            held[t.target][t.span][t.lo : t.hi] = elements_sent
            used[t.target, t.span] = np.ones(elements, bool)
            used[t.target, t.span][t.lo : t.hi] = False

    assert all(t.span is not None and holder[t.span] == t.source for t in plan.join)
    assert all((t.lo, t.hi) == plan.owned[t.target] for t in plan.reduce)
    deliver(plan.join)
    deliver(plan.reduce)
    results = [np.full(elements, np.nan, np.float32) for _ in range(world)]
    for rank, (lo, hi) in enumerate(plan.owned):
        if hi > lo:
            results[rank][lo:hi] = value(rank, root, lo, hi)
    assert all(mask.all() for mask in used.values()), "sent, but never needed"
    for transfers in (plan.gather, plan.spread):
        for t in transfers:
            assert t.span is None and np.isnan(results[t.target][t.lo : t.hi]).all(), "sent twice"
            results[t.target][t.lo : t.hi] = results[t.source][t.lo : t.hi]
    return results


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, tuple[str, ...], dict[str, Ranges]]:
    """lanes, the members in the end and what each of them holds: after rounds in which members finish a part of what
    they were dealt, some die with all they had, and others join."""
    lanes = draw(st.integers(1, 24))
    members = [f"w{i}" for i in range(draw(st.integers(1, 6)))]
    held: dict[str, Ranges] = {}
    born = len(members)
    for _ in range(draw(st.integers(0, 3))):
        busy = {member: draw(st.integers(0, 5)) for member in members}
        dealt = deal(lanes, members, held, busy)
        assert_dealt_once(lanes, members, held, dealt, busy)
        for member in members:
            todo = flat(dealt[member])
            done = todo[: draw(st.integers(0, len(todo)))]
            held[member] = merge_ranges(held.get(member, ()), tuple((x, x + 1) for x in done))
        dead = draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
        joined = draw(st.integers(0, 2))
        members = [m for m in members if m not in dead] + [f"w{born + i}" for i in range(joined)]
        born += joined
        held = {m: r for m, r in held.items() if m in members and r}
    dealt = deal(lanes, members, held)
    assert_dealt_once(lanes, members, held, dealt, {})
    return lanes, tuple(members), {m: merge_ranges(held.get(m, ()), dealt[m]) for m in members}


def assert_dealt_once(
    lanes: int,
    members: Sequence[str],
    held: Mapping[str, Ranges],
    dealt: Mapping[str, Ranges],
    busy: Mapping[str, int],
) -> None:
    assert set(dealt) == set(members)
    everything = [lane for part in (held, dealt) for ranges in part.values() for lane in flat(ranges)]
    assert sorted(everything) == list(range(lanes))
    sizes = {member: len(flat(ranges)) for member, ranges in dealt.items()}
    if not any(busy.values()):
        assert max(sizes.values()) == -(-sum(sizes.values()) // len(members)), "nobody waits for an overloaded member"
        return
    first_free = min(size + busy[member] for member, size in sizes.items())
    last = max((size + busy[member] for member, size in sizes.items() if size), default=0)
    assert last <= first_free + 1, "nobody waits for an overloaded member"


@given(histories(), st.integers(1, 3))
def test_a_row_is_dealt_what_a_member_would_be(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], mates: int
) -> None:
    lanes, members, everything = history
    held = {member: everything[member] for member in members[::2]}
    busy = {member: rank for rank, member in enumerate(members)}
    rows = [tuple(f"{member}.{mate}" for mate in range(mates)) for member in members]
    mates_held = {mate: held.get(member, ()) for member, row in zip(members, rows, strict=True) for mate in row}
    slowest = {row[-1]: busy[member] for member, row in zip(members, rows, strict=True)}
    alone = deal(lanes, members, held, busy)
    dealt = deal_to_rows(lanes, rows, mates_held, slowest)
    assert dealt == {mate: alone[member] for member, row in zip(members, rows, strict=True) for mate in row}


@given(histories(), st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
def test_any_history_gives_the_same_bits(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], elements: int, seed: int, data: st.DataObject
) -> None:
    """On any nodes."""
    lanes, members, placed = history
    nodes = [data.draw(st.sampled_from("abcd")) for _ in members]
    rng = np.random.default_rng(seed)
    gradients = [(rng.standard_normal(elements) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(lanes)]
    expected = tree_sum((0, lanes), gradients)
    plan = make_plan(members, nodes, lanes, placed, elements)
    for result in execute(plan, gradients, len(members)):
        assert result.tobytes() == expected.tobytes()


def test_a_plain_sum_would_show_the_placement() -> None:
    """The negative control: added up member by member, the same gradients give other bits."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(64).astype(np.float32) for _ in range(16)]
    sums = set()
    for world in (1, 2, 3, 4):
        cuts = balanced_cuts(16, world)
        total = np.zeros(64, np.float32)
        for lo, hi in pairwise(cuts):
            part = np.zeros(64, np.float32)
            for gradient in gradients[lo:hi]:
                part = part + gradient
            total = total + part
        sums.add(total.tobytes())
    assert len(sums) > 1


@given(histories(), st.integers(1, 40), st.data())
def test_owners_cover_every_element_once_in_whole_blocks(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], elements: int, data: st.DataObject
) -> None:
    lanes, members, placed = history
    for nodes in ([""] * len(members), [data.draw(st.sampled_from("abcd")) for _ in members]):
        plan = make_plan(members, nodes, lanes, placed, elements)
        owned = [x for lo, hi in plan.owned for x in range(lo, hi)]
        assert sorted(owned) == list(range(elements))
        assert len(set(nodes)) > 1 or owned == list(range(elements))
        assert all(lo % BLOCK == 0 or lo == elements for lo, _ in plan.owned)
        for node in set(nodes):
            carried = sorted(plan.stripes[rank] for rank, other in enumerate(nodes) if other == node)
            assert [x for lo, hi in carried for x in range(lo, hi)] == list(range(elements))


@given(histories(), st.integers(1, 60), st.data())
def test_the_plan_of_one_member_is_its_part_of_the_whole(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], elements: int, data: st.DataObject
) -> None:
    lanes, members, placed = history
    nodes = [data.draw(st.sampled_from("abcd")) for _ in members]
    whole = make_plan(members, nodes, lanes, placed, elements)
    for rank in range(len(members)):
        mine = make_plan(members, nodes, lanes, placed, elements, rank)
        assert (mine.cover, mine.owned, mine.stripes[rank]) == (whole.cover, whole.owned, whole.stripes[rank])
        for stage in ("join", "reduce", "gather", "spread"):
            expected = [t for t in getattr(whole, stage) if rank in (t.source, t.target)]
            assert list(getattr(mine, stage)) == expected


@pytest.mark.parametrize("several", [False, True], ids=["one-node", "one-member-per-node"])
@given(world=st.integers(1, 6), level=st.integers(0, 3), elements=st.integers(1, 60))
def test_one_partial_each_travels_like_reduce_scatter_and_all_gather(
    several: bool, world: int, level: int, elements: int
) -> None:
    members = [f"w{i}" for i in range(world)]
    lanes = world << level
    placed = deal(lanes, members, {})
    plan = make_plan(members, members if several else [""] * world, lanes, placed, elements)
    if len(plan.cover) > world:
        return
    everything = transfers(plan)
    assert sum(t.hi - t.lo for t in everything) == 2 * (world - 1) * elements
    for rank in range(world):
        busy = sum(t.hi - t.lo for t in everything if t.source == rank)
        lo, hi = plan.owned[rank]
        assert busy == (elements - (hi - lo)) + (world - 1) * (hi - lo)


@pytest.mark.parametrize("several", [False, True], ids=["one-node", "one-member-per-node"])
@given(history=histories(), elements=st.integers(1, 60))
def test_one_node_or_one_member_per_node_is_the_flat_plan(
    several: bool, history: tuple[int, tuple[str, ...], dict[str, Ranges]], elements: int
) -> None:
    lanes, members, placed = history
    plan = make_plan(members, members if several else [""] * len(members), lanes, placed, elements)
    ranges = [(rank, lo, hi) for rank, (lo, hi) in enumerate(plan.owned) if hi > lo]
    ranks = range(len(members))
    flat_reduce = [(h, r, node, lo, hi) for node, h in plan.cover for r, lo, hi in ranges if r != h]
    flat_gather = [(r, other, None, lo, hi) for r, lo, hi in ranges for other in ranks if r != other]
    assert not (plan.join or plan.spread) if several else plan.stripes == plan.owned
    assert several or not (plan.reduce or plan.gather)
    assert sorted(map(astuple, (*plan.join, *plan.reduce))) == sorted(flat_reduce)
    assert sorted(map(astuple, (*plan.gather, *plan.spread))) == sorted(flat_gather)


def crossing(plan: Plan, nodes: Sequence[str]) -> list[Transfer]:
    return [t for t in transfers(plan) if nodes[t.source] != nodes[t.target]]


@given(histories(), st.integers(1, 5), st.data())
def test_columns_never_send_more_between_nodes_than_the_flat_plan(
    history: tuple[int, tuple[str, ...], dict[str, Ranges]], each: int, data: st.DataObject
) -> None:
    """Compared where all own alike: with fewer blocks it depends on who happens to own the last one."""
    lanes, members, placed = history
    nodes = [data.draw(st.sampled_from("abc")) for _ in members]
    elements = len(members) * each * BLOCK
    stripes = crossing(make_plan(members, nodes, lanes, placed, elements), nodes)
    flat = crossing(make_plan(members, [""] * len(members), lanes, placed, elements), nodes)
    assert sum(t.hi - t.lo for t in stripes) <= sum(t.hi - t.lo for t in flat)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("machines", [2, 4])
@pytest.mark.parametrize("interleaved", [False, True], ids=["in-order", "ranks-interleaved"])
def test_each_byte_of_a_node_crosses_once(machines: int, workers: int, interleaved: bool) -> None:
    """A dense placement: out of each node, and in, as if it were one member; the flat plan sends `workers` times as
    much."""
    members = [f"n{n}/w{w}" for n in range(machines) for w in range(workers)]
    if interleaved:
        members.sort(key=lambda member: member.split("/")[1])
    nodes = [node_of(member) for member in members]
    elements = len(members) * 6 * BLOCK
    rows = tuple((member,) for member in members)
    placed, plan = plan_step(tuple(members), rows, 64, (), (0,) * len(members), elements)
    share = 2 * elements * (machines - 1) // machines
    for node in set(nodes):
        out = [t for t in crossing(plan, nodes) if nodes[t.source] == node]
        assert sum(t.hi - t.lo for t in out) == share
        assert sum(t.hi - t.lo for t in crossing(plan, nodes) if nodes[t.target] == node) == share
        for rank in (rank for rank, other in enumerate(nodes) if other == node):
            assert sum(t.hi - t.lo for t in out if t.source == rank) == share // workers, "all of a node carry alike"
    flat = crossing(make_plan(members, [""] * len(members), 64, placed, elements), nodes)
    assert sum(t.hi - t.lo for t in flat) == machines * workers * share
    assert len(transfers(plan)) <= len(transfers(make_plan(members, [""] * len(members), 64, placed, elements)))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_power_of_two_of_members_holds_one_partial_each(world: int) -> None:
    members = [f"w{i}" for i in range(world)]
    plan = make_plan(members, [""] * world, 32, deal(32, members, {}), 100)
    assert len(plan.cover) == world


@given(st.integers(1, 200), st.integers(1, 20))
def test_cuts_are_balanced(lanes: int, parts: int) -> None:
    cuts = balanced_cuts(lanes, parts)
    assert len(cuts) == parts + 1 and cuts[0] == 0 and cuts[-1] == lanes
    sizes = [hi - lo for lo, hi in pairwise(cuts)]
    assert min(sizes) >= 0 and max(sizes) == -(-lanes // parts)


@given(st.integers(1, 70))
def test_every_node_of_the_tree_has_its_own_number(lanes: int) -> None:
    nodes: list[Span] = [(0, lanes)]
    for node in nodes:
        if node[1] - node[0] > 1:
            nodes.extend(split(node))
    assert len(nodes) == 2 * lanes - 1
    assert len({key(n, lanes) for n in nodes}) == len(nodes)
    for node in nodes[1:]:
        parent, sibling = parent_and_sibling(node, lanes)
        assert set(split(parent)) == {node, sibling}


@given(st.integers(1, 40), st.data())
def test_maximal_nodes_cover_what_is_held_and_nothing_else(lanes: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, lanes - 1)))
    nodes = maximal_spans([(x, x + 1) for x in held], lanes)
    assert [x for lo, hi in nodes for x in range(lo, hi)] == sorted(held)
    for node in nodes:
        if node != (0, lanes):
            _, sibling = parent_and_sibling(node, lanes)
            assert sibling not in nodes, "two siblings are one larger node"
